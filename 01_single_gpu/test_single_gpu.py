"""single_gpu.py against a model written with loops, torch's AdamW, the harness's meter and in_depth.

What decides an exercise runs on a rank, a process of its own, as in all later chapters, and is compared here.
"""

import math
import random
import sys
from functools import cache
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import single_gpu
import torch
from harness.meter import held_bytes, peak_memory, saved_activations
from harness.programs import refusal
from harness.ranks import run_ranks
from harness.reference import Trace, adamw_by_hand, assert_same, assert_same_named, assert_same_trace, sgd_trace
from single_gpu import Llama, ModelConfig, accumulate, fused_attention, loss_sum, naive_attention, train_step
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parent / "in_depth"))

torch.set_num_threads(1)  # on tensors this small a second thread only waits
ODD = ModelConfig(37, 24, 2, 6, 2, 50)  # divides by nothing, three query heads per key/value head


def uneven_batch(config=ODD, num_valid=(11, 4, 1), batch=2, seq_len=7):
    """Micro-batches (tokens, labels) with these numbers of valid labels."""
    generator = torch.Generator().manual_seed(0)
    size = (2, batch, seq_len)
    micro_batches = [tuple(torch.randint(config.vocab_size, size, generator=generator)) for _ in num_valid]
    for (_, labels), count in zip(micro_batches, num_valid, strict=True):
        labels.view(-1)[count:] = single_gpu.IGNORE_INDEX
    return micro_batches


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# -------------------------------------------------- the same model, written with loops and complex numbers


def loss_with_loops(params, config, micro_batches):
    """The mean over all valid tokens of the full batch: one token, one head, one pair at a time."""
    losses = []
    for tokens, labels in ((t, x) for pair in micro_batches for t, x in zip(*pair, strict=True)):
        xs = [params["embed.weight"][token] for token in tokens]
        for i in range(config.n_layers):
            prefix = f"blocks.{i}."
            block = {name.removeprefix(prefix): p for name, p in params.items() if name.startswith(prefix)}
            xs = [x + a for x, a in zip(xs, attend(block, config, xs), strict=True)]
            for s, x in enumerate(xs):
                h = norm(x, block["mlp_norm.weight"])
                gate = block["gate_proj.weight"] @ h
                product = gate / (1 + torch.exp(-gate)) * (block["up_proj.weight"] @ h)
                xs[s] = x + block["down_proj.weight"] @ product
        for x, label in zip(xs, labels, strict=True):
            if label != single_gpu.IGNORE_INDEX:
                logits = params["head.weight"] @ norm(x, params["norm.weight"])
                losses.append(torch.log(torch.exp(logits).sum()) - logits[label])
    return sum(losses) / len(losses)


def norm(x, scale):
    return x / torch.sqrt((x * x).sum() / len(x) + 1e-5) * scale


def attend(block, config, xs):
    hs = [norm(x, block["attn_norm.weight"]) for x in xs]
    q, k, v = ([(block[f"{name}_proj.weight"] @ h).view(-1, config.head_dim) for h in hs] for name in "qkv")
    q, k = ([[rotated(x, position) for x in heads] for position, heads in enumerate(each)] for each in (q, k))
    out = []
    for s in range(len(xs)):
        heads = []
        for n in range(config.n_heads):
            kv = n * config.n_kv_heads // config.n_heads  # the head of keys and values that this query head shares
            scores = [(q[s][n] * k[t][kv].conj()).real.sum() / math.sqrt(config.head_dim) for t in range(s + 1)]
            total = sum(torch.exp(score) for score in scores)
            heads.append(sum(torch.exp(score) / total * v[t][kv] for t, score in enumerate(scores)))
        out.append(block["o_proj.weight"] @ torch.cat(heads))
    return out


def rotated(x, position):
    """A head: each pair of its elements is a complex number, rotated by position / 10000^(2i/D)."""
    half = len(x) // 2
    angles = position / 10000.0 ** (torch.arange(half).float() * 2 / len(x))  # fp32, as in all Llamas
    return torch.complex(x[:half], x[half:]) * torch.complex(angles.cos().double(), angles.sin().double())


@pytest.fixture(scope="module")
def expected():
    """What three steps of plain SGD give with the loops."""
    params = {name: p.detach().clone().requires_grad_() for name, p in Llama(ODD).double().named_parameters()}

    def backward(step):
        loss = loss_with_loops(params, ODD, uneven_batch())
        loss.backward()
        return loss.item()

    return sgd_trace(params, backward)


def trace_of(model, micro_batches) -> Trace:
    return sgd_trace(dict(model.double().named_parameters()), lambda step: accumulate(model, micro_batches).item())


def on_a_rank(micro_batches, attention=fused_attention, recompute=False) -> Trace:
    return trace_of(Llama(ODD, attention, recompute), micro_batches)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("attention", [naive_attention, fused_attention])
def test_losses_gradients_and_parameters_match_the_loops(attention, recompute, expected):
    [trace] = run_ranks(1, on_a_rank, uneven_batch(), attention, recompute)
    assert_same_trace(trace, expected)


def test_the_full_batch_at_once_matches_its_micro_batches(expected):
    full = [tuple(torch.cat(x) for x in zip(*uneven_batch(), strict=True))]
    assert_same_trace(trace_of(Llama(ODD), full), expected)


def test_micro_batches_without_valid_tokens_contribute_zero():
    full, gaps, none = (uneven_batch(num_valid=num_valid) for num_valid in ((9, 4), (9, 4, 0), (0, 0)))
    (expected,), (got,), (zeros,) = (run_ranks(1, on_a_rank, batch, recompute=True) for batch in (full, gaps, none))
    assert_same_trace(got, expected)
    assert zeros.losses == [0, 0, 0]
    assert all((gradient == 0).all() for step in zeros.gradients for gradient in step.values())


# ---------------------------------------------------------------------------------------------------------- the step


def steps_on_a_rank(max_norm):
    model = Llama(ODD, recompute=True).double()
    optimizer = single_gpu.adamw(model, lr=0.01)
    losses = [train_step(model, optimizer, uneven_batch(), max_norm).item() for _ in range(3)]
    return losses, dict(model.named_parameters())


@pytest.mark.parametrize(("max_norm", "clips"), [(0.05, True), (1000.0, False)])
def test_adamw_steps_match_a_loop_by_hand(max_norm, clips):
    [(losses, params)] = run_ranks(1, steps_on_a_rank, max_norm)
    model, batch = Llama(ODD, naive_attention).double(), (torch.cat(x) for x in zip(*uneven_batch(), strict=True))
    expected_losses, norms = adamw_by_hand(model, *batch, 0.01, max_norm)
    assert all((norm > max_norm) == clips for norm in norms)
    for step, (loss, expected) in enumerate(zip(losses, expected_losses, strict=True)):
        assert_same(loss, expected, what=f"loss of step {step}")
    assert_same_named(params, dict(model.named_parameters()), what="after three steps, parameter")
    groups = single_gpu.adamw(model, lr=0.01).param_groups
    assert all(len(group["params"]) == 1 for group in groups), "a GPU updates a group at once, with temporaries of all"


def test_clipping_scales_all_gradients_by_one_factor():
    clipped, unclipped = Llama(ODD).double(), Llama(ODD).double()
    train_step(clipped, torch.optim.SGD(clipped.parameters(), lr=0.0), uneven_batch(), max_norm=0.05)
    accumulate(unclipped, uneven_batch())
    grads = gradients(unclipped)
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
    expected = {name: grad * 0.05 / (norm + 1e-6) for name, grad in grads.items()}
    assert_same_named(gradients(clipped), expected, what="clipped gradient of")
    steep = Llama(ODD).double()
    steep.head.weight.data *= 1000  # a norm far above 1
    train_step(steep, torch.optim.SGD(steep.parameters(), lr=0.0), uneven_batch())
    norm = torch.stack([grad.norm() for grad in gradients(steep).values()]).norm()
    assert_same(norm, 1.0, 1e-6, "the norm that is left where no other is asked for")


# --------------------------------------------------------------------------------------------------- bytes and FLOPs


def random_shapes(count):
    """(config, batch, seq_len, micro-batches, recompute). FFN widths start at 2 H, vocabularies at a byte's values."""
    rng = random.Random(0)
    for _ in range(count):
        n_kv_heads = rng.randint(1, 3)
        n_heads = n_kv_heads * rng.randint(1, 3)
        hidden = n_heads * 2 * rng.randint(1, 8)
        ffn_hidden = 2 * hidden + rng.randint(0, rng.choice((1, 40, 700)))
        vocab_size = rng.choice((256, 257, 700))
        config = ModelConfig(vocab_size, hidden, rng.randint(1, 3), n_heads, n_kv_heads, ffn_hidden)
        yield config, rng.randint(1, 3), rng.randint(1, 33), rng.randint(2, 3), rng.random() < 0.5


SHAPES = list(random_shapes(600))
LARGER = {  # in each of the three places that can be the peak, what the formula takes the larger of
    "logits": ("loss", lambda c, tokens: 2 * tokens * c.vocab_size > (tokens + c.vocab_size) * c.hidden),
    "head": ("loss", lambda c, tokens: 2 * tokens * c.vocab_size < (tokens + c.vocab_size) * c.hidden),
    "gate and up": ("last block", lambda c, tokens: tokens > c.hidden),
    "down": ("last block", lambda c, tokens: tokens < c.hidden),
    "embedding": ("update", lambda c, tokens: c.vocab_size > c.ffn_hidden),
    "feed-forward": ("update", lambda c, tokens: c.vocab_size < c.ffn_hidden),
}


def formulas_on_a_rank(shapes, fused=True):
    found = []
    for config, batch, seq_len, num_micro_batches, recompute in shapes:
        saved = single_gpu.saved_activation_bytes(config, batch, seq_len, recompute, fused)
        found.append((saved, *single_gpu.peak_bytes(config, batch, seq_len, num_micro_batches, recompute)))
    return found


@cache
def formulas_of_shapes():
    return run_ranks(1, formulas_on_a_rank, SHAPES)[0]


@pytest.mark.as_written
@pytest.mark.parametrize("larger", LARGER)
def test_saved_and_peak_bytes_match_the_formulas(larger):
    expected_where, condition = LARGER[larger]
    formulas = formulas_of_shapes()
    picked = {}  # the first shape with recomputation, and the first without; for `head` none has recomputation
    for shape, (saved, peak, where) in zip(SHAPES, formulas, strict=True):
        config, batch, seq_len, num_micro_batches, recompute = shape
        if where == expected_where and condition(config, batch * seq_len):
            picked.setdefault(recompute, (shape, saved, peak))
    assert picked, f"in no shape the peak is at the {expected_where} because of {larger}"
    for shape, expected_saved, expected_peak in picked.values():
        config, batch, seq_len, num_micro_batches, _ = shape
        saved, timeline = single_gpu.measure_bytes(*shape)
        assert saved == expected_saved
        assert max(timeline) == expected_peak
        stored = 16 * single_gpu.num_params(config) + 16 * num_micro_batches * batch * seq_len
        assert timeline[0] == timeline[-1] == stored  # nothing stays behind


@pytest.mark.as_written
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("attention", [naive_attention, fused_attention])
def test_the_harness_counts_the_same_bytes(attention, recompute):
    config, tokens = ODD, 3 * 16
    model, micro_batches = Llama(config, attention, recompute), uneven_batch(num_valid=(48, 48), batch=3, seq_len=16)
    micro_batches = [(tokens.clone(), labels.clone()) for tokens, labels in micro_batches]
    optimizer = single_gpu.adamw(model, 1e-3)
    train_step(model, optimizer, micro_batches)
    held, params = held_bytes(model, optimizer), single_gpu.num_params(config)
    assert (held.parameters, held.gradients, held.optimizer) == (4 * params, 4 * params, 8 * params)
    with saved_activations(exclude=model.parameters()) as saved:
        loss_sum(model, *micro_batches[0])
    fused = attention is fused_attention
    [[(formula, peak, _)]] = run_ranks(1, formulas_on_a_rank, [(config, 3, 16, 2, recompute)], fused)
    assert saved.bytes == formula + 16 * tokens + 4  # tokens and labels, and a count that is a scalar
    if fused:
        with peak_memory() as memory:  # it counts what is new: not parameters, moments, tokens and labels
            train_step(model, optimizer, micro_batches)
        new = peak - 12 * params - 2 * 16 * tokens
        assert 0 <= memory.peak - new <= 40  # scalars: losses, the number of valid tokens


def test_the_first_step_peaks_lower_by_the_moments():
    config = ModelConfig()
    model, micro_batches = Llama(config), single_gpu.get_batch(2, 4, 64, seed=0)
    optimizer, peaks = single_gpu.adamw(model, 1e-3), []
    for _ in range(3):
        existing = [micro_batches, list(optimizer.state.values()), list(model.parameters())]
        with single_gpu.MemoryTracker(existing) as tracker:
            train_step(model, optimizer, micro_batches)
        peaks.append(max(tracker.timeline))
        del tracker
        model.zero_grad()
    assert peaks[1] == peaks[2] == peaks[0] + 8 * single_gpu.num_params(config)


def test_gradients_are_freed_before_the_forward_pass():
    [(_, timeline)] = run_ranks(1, single_gpu.measure_bytes, ModelConfig(), 2, 16, 2, False)
    assert min(timeline) == 12 * single_gpu.num_params(ModelConfig()) + 16 * 2 * 2 * 16  # tokens and labels


def test_one_micro_batch_has_activations_alive():
    runs = [run_ranks(1, single_gpu.measure_bytes, ModelConfig(), 2, 16, M, False) for M in (2, 4)]
    two, four = (max(timeline) for [(_, timeline)] in runs)
    assert four - two == 2 * 16 * 2 * 16  # tokens and labels of two more micro-batches


@pytest.mark.parametrize("recompute", [False, True])
def test_flops_match_torchs_counter(recompute):
    for config, *size, _, _ in SHAPES[:4]:
        with FlopCounterMode(display=False) as counter:
            accumulate(Llama(config, naive_attention, recompute), single_gpu.get_batch(1, *size, seed=0))
        assert counter.get_total_flops() == single_gpu.flops(config, *size, recompute)


def test_bytes_and_flops_match_in_depth():
    from accounting import activations, parameters, step_flops
    from llama import LlamaConfig

    config = LlamaConfig(37, 24, 2, 6, 2, 50)
    assert parameters(config) == single_gpu.num_params(ODD)
    assert step_flops(config, 3, 16).model == single_gpu.flops(ODD, 3, 16)
    for recompute, mode in ((False, "none"), (True, "full")):
        theirs = activations(config, 3, 16, 4, "fused", mode)
        theirs.pop("tokens, labels (int64)")
        assert sum(theirs.values()) == single_gpu.saved_activation_bytes(ODD, 3, 16, recompute) + 4  # a scalar
    large = (32000, 2**17, 2, 2**10, 2**3, 2**18)  # a formula has no limit; one matrix of this would take 16 GB
    theirs = activations(LlamaConfig(*large), 3, 16, 4, "fused", "none")
    theirs.pop("tokens, labels (int64)")
    [ours] = run_ranks(1, single_gpu.saved_activation_bytes, ModelConfig(*large), 3, 16)
    assert sum(theirs.values()) == ours + 4


# -------------------------------------------------------------------------------------------------- modes, precision


def test_recomputation_under_no_grad_saves_nothing():
    tokens, labels = uneven_batch()[0]
    with saved_activations() as saved, torch.no_grad():
        loss = loss_sum(Llama(ODD, recompute=True), tokens, labels)
    assert saved.bytes == 0 and not loss.requires_grad
    assert_same(loss, loss_sum(Llama(ODD), tokens, labels), 0.0, "loss")


def test_a_forward_pass_without_a_backward_pass_changes_nothing():
    model, expected = Llama(ODD, recompute=True).double(), Llama(ODD).double()
    loss_sum(model, *uneven_batch()[1])
    accumulate(model, uneven_batch())
    accumulate(expected, uneven_batch())
    assert_same_named(gradients(model), gradients(expected), what="gradient of")


def test_two_backward_passes_add_up():
    model = Llama(ODD, recompute=True).double()
    accumulate(model, uneven_batch())
    twice = {name: 2 * grad for name, grad in gradients(model).items()}
    accumulate(model, uneven_batch())
    assert_same_named(gradients(model), twice, what="gradient of")


def test_a_second_derivative_through_a_recomputed_block_is_refused():
    """Its second run is over, and with it what leads back to the parameters."""
    model = Llama(ODD, recompute=True)
    [grad] = torch.autograd.grad(loss_sum(model, *uneven_batch()[0]), [model.embed.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("frozen", [["embed"], ["embed", "blocks.0.q_proj", "blocks.1"]])  # a weight, a whole block
def test_recomputed_blocks_behind_a_frozen_embedding_are_trained(frozen):
    model, expected = Llama(ODD, recompute=True).double(), Llama(ODD).double()
    for m in (model, expected):
        m.eval()  # evaluation has no other step: nothing is dropped
        for name in frozen:
            m.get_submodule(name).requires_grad_(False)
        accumulate(m, uneven_batch())
        assert m.embed.weight.grad is None
    assert_same_named(gradients(model), gradients(expected), what="gradient of")
    with torch.no_grad():
        assert not model(uneven_batch()[0][0]).requires_grad


def test_recomputed_blocks_under_autocast_have_the_same_gradients():
    """The backward pass is inside of the context, too: the second run rounds as the first one did."""
    model, expected = Llama(ODD, recompute=True), Llama(ODD)
    with torch.autocast("cpu", torch.bfloat16):
        losses = [accumulate(m, uneven_batch()) for m in (model, expected)]
    assert_same(*losses, 1e-6, "loss")
    assert_same_named(gradients(model), gradients(expected), 1e-6, "gradient of")


def gradients_of(model, loss) -> dict:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def distance(got, want) -> float:
    """Over the whole tensor: the largest of a few thousand roundings is a matter of luck."""
    return ((got.double() - want).norm() / want.norm()).item()


def test_bf16_is_as_close_to_float64_as_naive_attention():
    tokens, labels = single_gpu.get_batch(1, 1, 400, seed=0)[0]
    fused, naive, exact = (Llama(ModelConfig(), a).bfloat16() for a in (fused_attention, *[naive_attention] * 2))
    fused.recompute, exact = True, exact.double()  # the same parameters, rounded to bf16, everywhere
    losses = [
        torch.nn.functional.cross_entropy(m(tokens).flatten(0, 1).to(dtype), labels.flatten())
        for m, dtype in ((naive, torch.float32), (exact, torch.float64))
    ]
    bounds, expected = gradients_of(naive, losses[0]), gradients_of(exact, losses[1])
    assert_same(accumulate(fused, [(tokens, labels)]), losses[1], 2e-3, "loss")
    for name, p in fused.named_parameters():
        error, allowed = distance(p.grad, expected[name]), 1.5 * distance(bounds[name], expected[name])
        assert error <= allowed, f"gradient of {name}: error {error:.3g}, at most {allowed:.3g}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_loss_is_summed_in_fp32_or_better(dtype):
    model, (tokens, labels) = Llama(ModelConfig()).to(dtype), single_gpu.get_batch(1, 1, 400, seed=0)[0]
    expected = torch.nn.functional.cross_entropy(model(tokens)[0].double(), labels[0], reduction="sum")
    loss = loss_sum(model, tokens, labels)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_same(loss, expected, 1e-15 if dtype == torch.float64 else 1e-6, "loss")


def test_tokens_and_labels_may_have_strides():
    model, (tokens, labels) = Llama(ODD), uneven_batch()[0]
    expected = accumulate(model, [(tokens, labels)])
    assert_same(accumulate(model, [(tokens.T.contiguous().T, labels.T.contiguous().T)]), expected, 0.0, "loss")


def test_rotary_rounds_once_in_bf16():
    x = torch.randn(1, 50, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    angle = torch.rand(50, 1, 4, generator=torch.Generator().manual_seed(1)) * 400
    expected = single_gpu.apply_rotary(x.float(), angle.cos(), angle.sin()).bfloat16()
    [rotated] = run_ranks(1, single_gpu.apply_rotary, x, angle.cos(), angle.sin())
    assert torch.equal(rotated, expected)


def test_positions_above_256_differ_in_bf16():
    """What the model makes of queries and keys, next to float64: rounded once, wherever they stand."""
    seen, rotate = [], single_gpu.apply_rotary

    def record(x, *angles):
        seen.append((x, rotate(x, *angles)))
        return seen[-1][1]

    with patch.object(single_gpu, "apply_rotary", record):
        Llama(ModelConfig(n_layers=1)).bfloat16()(torch.full((1, 300), 7))
    for x, rotated in seen:
        x1, x2 = x.double().chunk(2, -1)
        inv_freq = 10000.0 ** (-torch.arange(x1.shape[-1], dtype=torch.float64) / x1.shape[-1])
        angle = torch.arange(300, dtype=torch.float64)[:, None, None] * inv_freq
        expected = torch.cat((x1 * angle.cos() - x2 * angle.sin(), x2 * angle.cos() + x1 * angle.sin()), -1)
        beyond = ((rotated - expected).abs() - 2**-8 * expected.abs()).max() / x.abs().max()
        assert beyond <= 1e-4, f"{beyond:.1e} beyond one rounding"


def test_the_returned_loss_has_no_graph():
    model = Llama(ODD)
    assert not accumulate(model, uneven_batch()).requires_grad
    assert not train_step(model, single_gpu.adamw(model, 0.01), uneven_batch()).requires_grad


# ---------------------------------------------------------------------------------------------------- data, the script


def test_labels_are_the_next_tokens_and_windows_reach_the_last_one(monkeypatch):
    text = Path(single_gpu.tokenize.__file__).read_bytes()
    micro_batches = single_gpu.get_batch(2, 3, 9, seed=4)
    assert len(micro_batches) == 2
    for tokens, labels in micro_batches:
        assert tokens.shape == labels.shape == (3, 9) and tokens.dtype == labels.dtype == torch.long
        assert torch.equal(tokens[:, 1:], labels[:, :-1])
        for row, label in zip(tokens.tolist(), labels[:, -1].tolist(), strict=True):
            assert bytes([*row, label]) in text
    assert torch.equal(single_gpu.get_batch(1, 3, 9, seed=4)[0][0], micro_batches[0][0])
    for other in (single_gpu.get_batch(1, 3, 9, seed=5)[0][0], micro_batches[1][0]):
        assert not torch.equal(other, micro_batches[0][0])
    monkeypatch.setattr(torch, "randint", lambda high, size, generator: torch.full(size, high - 1))
    assert bytes(single_gpu.get_batch(1, 1, 9, seed=0)[0][1][0].tolist()) == text[-9:]


def test_tables_and_batches_are_made_on_the_device_that_is_given():
    tables = single_gpu.rotary_tables(3, 4, torch.device("meta"))
    batches = single_gpu.get_batch(1, 2, 9, seed=0, device="meta")
    assert all(x.is_meta for x in (*tables, *batches[0]))


def run_main(options, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["single_gpu.py", *options.split()])
    try:
        code = single_gpu.main()
    except SystemExit as end:
        code = end.code
    said, complained = capsys.readouterr()
    return code, said.splitlines(), complained


def test_the_script_passes_and_every_option_reaches_the_step(capsys, monkeypatch):
    seen, drawn = [], []  # of each step: (recompute, number of micro-batches, their shape), and its first tokens

    def record(model, optimizer, micro_batches):
        seen.append((model.recompute, len(micro_batches), tuple(micro_batches[0][0].shape)))
        drawn.append(micro_batches[0][0])
        return train_step(model, optimizer, micro_batches)

    code, said, _ = run_main("--steps 1 --seq-len 8", capsys, monkeypatch)
    assert code == 0 and said[-1] == "PASS"
    monkeypatch.setattr(single_gpu, "train_step", record)
    monkeypatch.setattr(single_gpu, "check", lambda *args: [])
    with monkeypatch.context() as m:
        m.setattr(single_gpu, "time", Mock(**{"perf_counter.side_effect": (0.0, 3e-6)}))
        _, said, _ = run_main("--steps 3 --micro-batches 5 --micro-batch 2 --seq-len 7 --recompute", capsys, m)
    shown = [float(line.split()[-1].replace(",", "")) for line in said if "per second" in line or "MFU" in line]
    flops = 5 * single_gpu.flops(single_gpu.ModelConfig(), 2, 7)  # the model's: recomputation is not counted
    assert shown == pytest.approx([5 * 2 * 7 / 1e-6, flops / 1e-6 / 1e12], rel=1e-3)
    run_main("--steps 2", capsys, monkeypatch)
    assert seen == [(True, 5, (2, 7))] * 3 + [(False, 2, (4, 64))] * 2
    assert not torch.equal(drawn[0], drawn[1]), "each step has a batch of its own"
    monkeypatch.setattr(single_gpu, "train", lambda *args: [])
    assert run_main("--steps 100000 --micro-batches 1000 --micro-batch 64 --seq-len 4096", capsys, monkeypatch)[0] == 0


@pytest.mark.parametrize(
    ("losses", "mean", "passes"),
    [
        ([9.0] * 50 + [1.0] * 9 + [11.0], "2.000", True),  # the last ten are judged
        ([3.35] * 60, "3.350", False),
        ([4.0] * 3, "4.000", True),  # too few to judge
        ([4.0] * 59, "4.000", True),
        ([math.nan], "nan", False),
        ([1.0] * 59 + [math.nan], "nan", False),
        ([3.3] * 60, "3.300", True),  # 0.6 log 256 is 3.327
    ],
)
def test_the_loss_must_fall_and_be_finite(losses, mean, passes, capsys, monkeypatch):
    monkeypatch.setattr(single_gpu, "check", lambda *args: [])
    remaining = iter(losses)
    monkeypatch.setattr(single_gpu, "train_step", lambda *args: torch.tensor(next(remaining)))
    code, said, _ = run_main(f"--steps {len(losses)}", capsys, monkeypatch)
    assert code == (0 if passes else 1)
    assert (said[-1] == "PASS") == passes and any(line.startswith("loss") and line.endswith(mean) for line in said[:-1])
    assert passes or f"loss, mean of the last ten steps: {mean}" in said[-1]


def test_a_wrong_number_ends_with_status_1_and_is_named(capsys, monkeypatch):
    """NaN; and formulas that are too small by one, or too large with recomputation."""
    monkeypatch.setattr(single_gpu, "largest_error", lambda *args: math.nan)
    monkeypatch.setattr(single_gpu, "train", lambda *args: [])
    for name in ("saved_activation_bytes", "peak_bytes", "flops"):
        real = getattr(single_gpu, name)
        off = lambda *args, real=real: real(*args) + (1 if args[-1] else -1)  # noqa: E731
        moved = lambda *args, real=real: (real(*args)[0] + (1 if args[-1] else -1), "nowhere")  # noqa: E731
        monkeypatch.setattr(single_gpu, name, moved if name == "peak_bytes" else off)
    code, said, _ = run_main("", capsys, monkeypatch)
    assert code == 1 and "largest relative error" in said[-1]
    for words in ("bytes saved", "bytes at the peak", "FLOPs"):
        assert f"; {words}" in said[-1] and f"; recomputed: {words}" in said[-1]
    assert "; FLOPs: 66,355,200, not 66,355,199" in said[-1], "measured, not formula"


def test_the_six_steps_record_each_loss_gradient_and_parameter():
    model = Llama(ModelConfig(256, 24, 1, 6, 2, 50))
    history = single_gpu.six_steps(model, train_step, "cpu")
    params = list(model.parameters())
    each = 1 + 2 * len(params)
    last = [*(p.grad for p in params), *params]
    assert len(history) == 6 * each
    assert all(torch.equal(got, want) for got, want in zip(history[1 - each :], last, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(history[:each], history[-each:], strict=True)), "copies are kept"
    assert torch.stack([p.grad.norm() for p in params]).norm() <= 0.1, "the steps of AdamW clip"


@pytest.mark.parametrize("wrong", [math.nan, -1.0])
def test_the_largest_error_is_nan_if_one_is_and_has_no_sign(wrong, monkeypatch):
    steps, seen = iter(([torch.ones(1), torch.full((1,), wrong), torch.ones(1)], [torch.ones(1)] * 3)), []
    monkeypatch.setattr(single_gpu, "six_steps", lambda m, *args: seen.append((m.recompute, *args)) or next(steps))
    assert not single_gpu.largest_error(ModelConfig(), "a GPU") < 2.0
    assert seen == [(True, train_step, "a GPU"), (False, single_gpu.reference_step, "a GPU")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--steps 0", "--steps 0 must be 1 to"),
        ("--seq-len 4097", "--seq-len 4097 must be 1 to 4096"),
        ("--micro-batch -1", "--micro-batch -1 must be 1 to"),
        ("--steps 100001", "--steps 100001 must be 1 to 100000"),
        ("--micro-batch 65", "--micro-batch 65 must be 1 to 64"),
        ("--micro-batches 1001", "--micro-batches 1001 must be 1 to 1000"),
        ("--seq-len nan", "argument --seq-len: invalid int value: 'nan'"),
        ("--recompute yes", "unrecognized arguments: yes"),
    ],
)
def test_a_wrong_option_is_named_in_one_line(options, words):
    assert words in refusal(single_gpu.main, options)


def test_two_ranks_are_referred_to_chapter_2():
    said = refusal(single_gpu.main, world_size=2)
    assert "WORLD_SIZE 2" in said and "02_data_parallel" in said
