"""The ground floor of chapter 1 against a model written with loops, torch's AdamW, the harness's meter and in_depth.

What decides an exercise runs on a rank, a process of its own, as in all later chapters, and is compared here.
"""

import math
import sys
from pathlib import Path

import pytest
import single_gpu
import torch
from harness.meter import held_bytes, peak_memory, saved_activations
from harness.oracle import Trace, assert_same, assert_same_named, assert_same_trace, sgd_trace
from harness.ranks import run_ranks
from single_gpu import IGNORE, Llama, Sizes, accumulate, fused_attention, loss_sum, plain_attention, train_step
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parent / "in_depth"))

torch.set_num_threads(1)  # on tensors this small a second thread only waits
ODD = Sizes(V=37, H=24, L=2, N=6, K=2, F=50, D=4)  # divides by nothing, three queries for each key
SHAPES = [Sizes(), Sizes(V=257, H=24, L=2, N=6, K=2, F=50, D=4), Sizes(V=500, H=32, L=3, N=2, K=1, F=33, D=16)]
SHAPES += [Sizes(V=256, H=16, L=1, N=4, K=4, F=900, D=4)]  # a feed-forward that outweighs the loss


def uneven_batch(c=ODD, valid=(11, 4, 1), B=2, S=7):
    """Micro-batches (tokens, labels) with these numbers of valid labels."""
    generator = torch.Generator().manual_seed(0)
    batch = [tuple(torch.randint(c.V, (B, S), generator=generator) for _ in range(2)) for _ in valid]
    for (_, labels), count in zip(batch, valid, strict=True):
        labels.view(-1)[count:] = IGNORE
    return batch


# ------------------------------------------------------------- the same model, written with loops and complex numbers


def loss_with_loops(w, c, batch):
    """The mean over all valid tokens of the whole batch: one token, one head, one pair at a time."""
    losses = []
    for tokens, labels in ((t, x) for pair in batch for t, x in zip(*pair, strict=True)):
        xs = [w["embed.weight"][token] for token in tokens]
        for i in range(c.L):
            block = {name.removeprefix(f"blocks.{i}."): p for name, p in w.items() if name.startswith(f"blocks.{i}.")}
            xs = [x + a for x, a in zip(xs, attend(block, c, xs), strict=True)]
            for s, x in enumerate(xs):
                h = norm(x, block["norm2.weight"])
                gate = block["gate.weight"] @ h
                xs[s] = x + block["down.weight"] @ (gate / (1 + torch.exp(-gate)) * (block["up.weight"] @ h))
        for x, label in zip(xs, labels, strict=True):
            if label != IGNORE:
                scores = w["head.weight"] @ norm(x, w["norm.weight"])
                losses.append(torch.log(torch.exp(scores).sum()) - scores[label])
    return sum(losses) / len(losses)


def norm(x, scale):
    return x / torch.sqrt((x * x).sum() / len(x) + 1e-5) * scale


def attend(block, c, xs):
    hs = [norm(x, block["norm1.weight"]) for x in xs]
    q, k, v = ([(block[f"{name}.weight"] @ h).view(-1, c.D) for h in hs] for name in "qkv")
    out = []
    for s in range(len(xs)):
        heads = []
        for n in range(c.N):
            of = n * c.K // c.N  # the head of keys and values that this query shares
            scores = [turned_product(q[s][n], k[t][of], s, t) / math.sqrt(c.D) for t in range(s + 1)]
            total = sum(torch.exp(score) for score in scores)
            heads.append(sum(torch.exp(score) / total * v[t][of] for t, score in enumerate(scores)))
        out.append(block["out.weight"] @ torch.cat(heads))
    return out


def turned_product(q, k, s, t):
    """q at position s times k at position t: each pair is a complex number, turned by position / 10000^(2i/D)."""
    half = len(q) // 2
    turned = []
    for x, position in ((q, s), (k, t)):
        angles = position / 10000.0 ** (torch.arange(half).float() * 2 / len(q))  # fp32, as in all Llamas
        turned.append(torch.complex(x[:half], x[half:]) * torch.complex(angles.cos().double(), angles.sin().double()))
    return (turned[0] * turned[1].conj()).real.sum()


@pytest.fixture(scope="module")
def right():
    """What three steps of plain SGD give with the loops."""
    weights = {name: p.detach().clone().requires_grad_() for name, p in Llama(ODD).double().named_parameters()}
    batch = uneven_batch()

    def backward(step):
        loss = loss_with_loops(weights, ODD, batch)
        loss.backward()
        return loss.item()

    return sgd_trace(weights, backward)


def trace_of(model, batch) -> Trace:
    return sgd_trace(dict(model.double().named_parameters()), lambda step: accumulate(model, batch).item())


def on_a_rank(batch, attention=fused_attention, recompute=False) -> Trace:
    return trace_of(Llama(ODD, attention, recompute), batch)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("attention", [plain_attention, fused_attention])
def test_loss_every_gradient_and_weights_after_three_steps_are_those_of_plain_loops(attention, recompute, right):
    [trace] = run_ranks(1, on_a_rank, uneven_batch(), attention, recompute)
    assert_same_trace(trace, right)


def test_the_whole_batch_at_once_gives_the_same_as_its_micro_batches(right):
    whole = [tuple(torch.cat(x) for x in zip(*uneven_batch(), strict=True))]
    assert_same_trace(trace_of(Llama(ODD), whole), right)


def test_a_micro_batch_without_valid_tokens_changes_nothing_and_a_batch_without_any_gives_zeros():
    full, gaps, none = (uneven_batch(valid=valid) for valid in ((9, 4), (9, 4, 0), (0, 0)))
    (want,), (got,), (zeros,) = (run_ranks(1, on_a_rank, batch, recompute=True) for batch in (full, gaps, none))
    assert_same_trace(got, want)
    assert zeros.losses == [0, 0, 0]
    assert all((gradient == 0).all() for step in zeros.gradients for gradient in step.values())


def test_it_is_the_model_of_in_depth_with_the_same_weights():
    import llama
    from training_step import accumulate as accumulate_in_depth

    names = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "norm1": "input_layernorm"}
    names |= {"norm2": "post_attention_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj"}
    names |= {"v": "self_attn.v_proj", "out": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj"}
    names |= {"down": "mlp.down_proj"}

    def in_depth(name):
        *block, kind, weight = name.removeprefix("blocks.").split(".")
        return ".".join([*("model", "layers", *block) * bool(block), names[kind], weight])

    mine = Llama(ODD, recompute=True).double()
    config = llama.LlamaConfig(ODD.V, ODD.H, ODD.L, ODD.N, ODD.K, ODD.F)
    theirs = llama.Llama(config, recompute="full").double()
    theirs.load_state_dict({in_depth(name): p for name, p in mine.state_dict().items()})
    loss = accumulate(mine, uneven_batch())
    assert_same(loss, accumulate_in_depth(theirs, uneven_batch()), what="loss")
    want = dict(theirs.named_parameters())
    gradients = {name: p.grad for name, p in mine.named_parameters()}
    assert_same_named(gradients, {name: want[in_depth(name)].grad for name in gradients}, what="gradient of")


# ---------------------------------------------------------------------------------------------------------- the step


def steps_by_hand(batch, limit, steps=3, lr=0.01):
    """Losses and weights: autograd on torch's mean of the whole batch, clipping by the formula, torch's AdamW."""
    model = Llama(ODD, plain_attention).double()
    large, small = ([p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False))
    groups = [{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
    tokens, labels = (torch.cat(x) for x in zip(*batch, strict=True))
    losses, norms, parameters = [], [], list(model.parameters())
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        gradients = torch.autograd.grad(loss, parameters)
        norms.append(math.sqrt(sum((g * g).sum().item() for g in gradients)))
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g * min(1.0, limit / (norms[-1] + 1e-6))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, dict(model.named_parameters())


def steps_on_a_rank(limit):
    batch, model = uneven_batch(), Llama(ODD, recompute=True).double()
    optimizer = single_gpu.adamw(model, lr=0.01)
    losses = [train_step(model, optimizer, batch, limit).item() for _ in range(3)]
    return losses, dict(model.named_parameters())


@pytest.mark.parametrize(("limit", "clips"), [(0.05, True), (1000.0, False)])
def test_three_steps_are_a_hand_written_loop_with_torchs_adamw_whether_clipping_is_active_or_not(limit, clips):
    [(losses, weights)] = run_ranks(1, steps_on_a_rank, limit)
    right_losses, norms, right_weights = steps_by_hand(uneven_batch(), limit)
    assert all((norm > limit) == clips for norm in norms)
    for step, (loss, want) in enumerate(zip(losses, right_losses, strict=True)):
        assert_same(loss, want, what=f"loss of step {step}")
    assert_same_named(weights, right_weights, what="after three steps, weight")


def test_the_gradients_left_behind_are_clipped_all_by_one_factor():
    clipped, plain = Llama(ODD).double(), Llama(ODD).double()
    train_step(clipped, torch.optim.SGD(clipped.parameters(), lr=0.0), uneven_batch(), limit=0.05)
    accumulate(plain, uneven_batch())
    norm = torch.stack([p.grad.norm() for p in plain.parameters()]).norm()
    want = {name: p.grad * 0.05 / (norm + 1e-6) for name, p in plain.named_parameters()}
    assert_same_named({name: p.grad for name, p in clipped.named_parameters()}, want, what="clipped gradient of")


# --------------------------------------------------------------------------------------------------- bytes and FLOPs


def formulas_on_a_rank(c, B, S, M, recompute, fused=True):
    return single_gpu.kept_bytes(c, B, S, recompute, fused), single_gpu.peak_bytes(c, B, S, M, recompute)[0]


@pytest.mark.parametrize("c", SHAPES, ids=str)
@pytest.mark.parametrize("B, S, M", [(3, 32, 2), (1, 9, 3), (5, 40, 2)])
@pytest.mark.parametrize("recompute", [False, True])
def test_bytes_held_kept_and_at_the_peak_are_those_of_the_formulas_to_the_byte(c, B, S, M, recompute):
    kept, course = single_gpu.measure(c, B, S, M, recompute)
    [(kept_by_formula, peak_by_formula)] = run_ranks(1, formulas_on_a_rank, c, B, S, M, recompute)
    assert kept == kept_by_formula
    assert max(course) == peak_by_formula
    assert course[0] == course[-1] == 16 * single_gpu.weights(c) + 16 * M * B * S  # nothing stays behind


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("attention", [plain_attention, fused_attention])
def test_the_harness_counts_the_same_bytes(attention, recompute):
    c, B, S, M = ODD, 3, 16, 2
    model, batch = Llama(c, attention, recompute), single_gpu.draw_batch(M, B, S, seed=0)
    batch = [(tokens % c.V, labels % c.V) for tokens, labels in batch]
    optimizer = single_gpu.adamw(model, 1e-3)
    train_step(model, optimizer, batch)
    held, W = held_bytes(model, optimizer), single_gpu.weights(c)
    assert (held.parameters, held.gradients, held.optimizer) == (4 * W, 4 * W, 8 * W)
    with saved_activations(exclude=model.parameters()) as saved:
        loss_sum(model, *batch[0])
    tokens_labels_and_a_count = 2 * 8 * B * S + 4
    fused = attention is fused_attention
    [(formula, peak)] = run_ranks(1, formulas_on_a_rank, c, B, S, M, recompute, fused)
    assert saved.bytes == formula + tokens_labels_and_a_count
    if fused:
        with peak_memory() as memory:  # it counts what is new: not the weights, the moments, the batch
            train_step(model, optimizer, batch)
        new = peak - 12 * W - 16 * M * B * S
        assert 0 <= memory.peak - new <= 40  # numbers that stand alone: losses, the count of valid tokens


def test_the_first_step_peaks_lower_by_the_two_moments_that_adamw_makes_at_its_end():
    c = Sizes()
    model, batch = Llama(c), single_gpu.draw_batch(2, 4, 64, seed=0)
    optimizer, peaks = single_gpu.adamw(model, 1e-3), []
    for _ in range(3):
        with single_gpu.Meter([batch, list(optimizer.state.values()), list(model.parameters())]) as meter:
            train_step(model, optimizer, batch)
        peaks.append(max(meter.course))
        del meter
        model.zero_grad()
    assert peaks[1] == peaks[2] == peaks[0] + 8 * single_gpu.weights(c)


def test_the_gradients_of_the_step_before_are_let_go_before_forward():
    c = Sizes()
    _, course = single_gpu.measure(c, 2, 16, 2, False)
    assert min(course) == 12 * single_gpu.weights(c) + 16 * 2 * 2 * 16  # weights and two moments; tokens and labels


def test_the_activations_of_one_micro_batch_are_alive_at_a_time():
    two, four = (max(single_gpu.measure(Sizes(), 2, 16, M, False)[1]) for M in (2, 4))
    assert four - two == 2 * 16 * 2 * 16  # tokens and labels of two more micro-batches


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("c", SHAPES, ids=str)
def test_flops_are_those_that_torch_counts(c, recompute):
    batch = single_gpu.draw_batch(1, 2, 11, seed=0)
    with FlopCounterMode(display=False) as counter:
        accumulate(Llama(c, plain_attention, recompute), batch)
    assert counter.get_total_flops() == single_gpu.flops(c, 2, 11, recompute)


def test_bytes_and_flops_agree_with_the_accounting_of_in_depth():
    from accounting import activations, parameters, step_flops
    from llama import LlamaConfig

    config, (B, S) = LlamaConfig(ODD.V, ODD.H, ODD.L, ODD.N, ODD.K, ODD.F), (3, 16)
    assert parameters(config) == single_gpu.weights(ODD)
    assert step_flops(config, B, S).model == single_gpu.flops(ODD, B, S)
    for recompute, mode in ((False, "none"), (True, "full")):
        theirs = activations(config, B, S, 4, "fused", mode)
        theirs.pop("tokens, labels (int64)")
        assert sum(theirs.values()) == single_gpu.kept_bytes(ODD, B, S, recompute) + 4  # a number that stands alone


# -------------------------------------------------------------------------------------------------- modes, precision


def test_without_gradients_recomputation_keeps_nothing_and_gives_the_same():
    model, plain = Llama(ODD, recompute=True), Llama(ODD)
    tokens, labels = uneven_batch()[0]
    with saved_activations() as saved, torch.no_grad():
        loss = loss_sum(model, tokens, labels)
    assert saved.bytes == 0 and not loss.requires_grad
    assert_same(loss, loss_sum(plain, tokens, labels), 0.0, "loss")


def test_a_forward_whose_backward_never_comes_does_no_harm_to_the_next():
    model, batch = Llama(ODD, recompute=True).double(), uneven_batch()
    loss_sum(model, *batch[1])
    accumulate(model, batch)
    want = Llama(ODD).double()
    accumulate(want, batch)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert_same_named(gradients, {name: p.grad for name, p in want.named_parameters()}, what="gradient of")


def test_gradients_of_two_backwards_add_up():
    model, batch = Llama(ODD, recompute=True).double(), uneven_batch()
    accumulate(model, batch)
    once = {name: 2 * p.grad for name, p in model.named_parameters()}
    accumulate(model, batch)
    assert_same_named({name: p.grad for name, p in model.named_parameters()}, once, what="gradient of")


def test_with_a_frozen_embedding_recomputed_blocks_have_the_gradients_of_plain_ones():
    model, plain = Llama(ODD, recompute=True).double(), Llama(ODD).double()
    for m in (model, plain):
        m.embed.weight.requires_grad_(False)
        accumulate(m, uneven_batch())
        assert m.embed.weight.grad is None
    want = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    assert_same_named({name: model.get_parameter(name).grad for name in want}, want, what="gradient of")
    with torch.no_grad():
        assert not model(uneven_batch()[0][0]).requires_grad


def gradients_of(model, loss) -> dict:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def distance(got, want) -> float:
    """Over the whole tensor: the largest of a few thousand roundings is a matter of luck."""
    return ((got.double() - want).norm() / want.norm()).item()


def test_in_bf16_it_is_as_near_to_float64_as_torchs_own_plain_form_is_in_bf16():
    tokens, labels = single_gpu.draw_batch(1, 1, 400, seed=0)[0]
    mine, dense, exact = (Llama(Sizes(), a).bfloat16() for a in (fused_attention, plain_attention, plain_attention))
    mine.recompute, exact = True, exact.double()  # the same weights, rounded to bf16, everywhere
    losses = [
        torch.nn.functional.cross_entropy(m(tokens).flatten(0, 1).to(dtype), labels.flatten())
        for m, dtype in ((dense, torch.float32), (exact, torch.float64))
    ]
    bounds, want = gradients_of(dense, losses[0]), gradients_of(exact, losses[1])
    assert_same(accumulate(mine, [(tokens, labels)]), losses[1], 2e-3, "loss")
    for name, p in mine.named_parameters():
        error, allowed = distance(p.grad, want[name]), 1.5 * distance(bounds[name], want[name])
        assert error <= allowed, f"gradient of {name}: error {error:.3g}, at most {allowed:.3g}"


def test_the_loss_of_a_model_in_bf16_is_added_up_in_fp32():
    model, (tokens, labels) = Llama(Sizes()).bfloat16(), single_gpu.draw_batch(1, 1, 400, seed=0)[0]
    want = torch.nn.functional.cross_entropy(model(tokens)[0].double(), labels[0], reduction="sum")
    loss = loss_sum(model, tokens, labels)
    assert loss.dtype == torch.float32
    assert_same(loss, want, 1e-6, "loss")


def test_in_bf16_queries_are_rounded_once_and_only_after_they_were_turned():
    x = torch.randn(1, 50, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    angle = torch.rand(50, 1, 4, generator=torch.Generator().manual_seed(1)) * 400
    want = single_gpu.rotate(x.float(), angle.cos(), angle.sin()).bfloat16()
    [turned] = run_ranks(1, single_gpu.rotate, x, angle.cos(), angle.sin())
    assert torch.equal(turned, want)


def test_positions_beyond_256_are_told_apart_in_bf16():
    """Where all tokens are the same, only their positions tell their queries apart."""
    seen = []

    def look(q, k, v):
        seen.append(q[0, :, 0])
        return plain_attention(q, k, v)

    model = Llama(Sizes(L=1), look).bfloat16()
    model(torch.full((1, 300), 7))
    first, second = seen[0][256], seen[0][257]
    assert not torch.equal(first, second)


def test_the_losses_that_are_returned_belong_to_no_graph():
    model = Llama(ODD)
    assert not accumulate(model, uneven_batch()).requires_grad
    assert not train_step(model, single_gpu.adamw(model, 0.01), uneven_batch()).requires_grad


# ---------------------------------------------------------------------------------------------------- data, the script


def test_the_label_of_a_token_is_the_token_after_it_and_the_seed_decides():
    text = Path(single_gpu.tokenize.__file__).read_bytes()
    batch = single_gpu.draw_batch(2, 3, 9, seed=4)
    assert len(batch) == 2
    for tokens, labels in batch:
        assert tokens.shape == labels.shape == (3, 9) and tokens.dtype == labels.dtype == torch.long
        assert torch.equal(tokens[:, 1:], labels[:, :-1])
        for row, label in zip(tokens.tolist(), labels[:, -1].tolist(), strict=True):
            assert bytes([*row, label]) in text
    assert torch.equal(single_gpu.draw_batch(1, 3, 9, seed=4)[0][0], batch[0][0])
    assert not torch.equal(single_gpu.draw_batch(1, 3, 9, seed=5)[0][0], batch[0][0])


def run_main(options, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["single_gpu.py", *options.split()])
    try:
        code = single_gpu.main()
    except SystemExit as end:
        code = end.code
    said, complained = capsys.readouterr()
    return code, said.splitlines(), complained


def test_it_runs_alone_and_ends_with_pass_and_names_no_mfu_for_a_cpu(capsys, monkeypatch):
    code, said, _ = run_main("--recompute --micro-batches 3 --micro-batch 1 --seq 20 --steps 2", capsys, monkeypatch)
    assert code == 0 and said[-1] == "PASS"
    assert torch.cuda.is_available() or ("MFU of CPU" in said[-2] and said[-2].endswith("n/a"))


def without_checks(monkeypatch):
    """Leave `main` its training alone: what it checks before has tests of its own."""

    def as_predicted(c, B, S, M, again):
        return single_gpu.kept_bytes(c, B, S, again), [single_gpu.peak_bytes(c, B, S, M, again)[0]]

    monkeypatch.setattr(single_gpu, "six_steps", lambda *args: [torch.ones(1)])
    monkeypatch.setattr(single_gpu, "measure", as_predicted)


def trained_with(options, capsys, monkeypatch):
    """What `main` hands to the step: (recompute, micro-batches, their shape) of each step."""
    seen = []

    def note(model, optimizer, batch):
        seen.append((model.recompute, len(batch), tuple(batch[0][0].shape)))
        return torch.tensor(0.0)

    without_checks(monkeypatch)
    monkeypatch.setattr(single_gpu, "train_step", note)
    run_main(options, capsys, monkeypatch)
    return seen


def test_every_option_reaches_the_step(capsys, monkeypatch):
    assert trained_with("", capsys, monkeypatch) == [(False, 2, (4, 64))] * 60
    options = "--steps 3 --micro-batches 5 --micro-batch 2 --seq 7 --recompute"
    assert trained_with(options, capsys, monkeypatch) == [(True, 5, (2, 7))] * 3


def test_the_loss_that_is_judged_is_the_mean_of_the_last_ten_steps(capsys, monkeypatch):
    losses = iter([9.0] * 50 + [1.0] * 9 + [11.0])
    monkeypatch.setattr(single_gpu, "train_step", lambda *args: torch.tensor(next(losses)))
    without_checks(monkeypatch)
    code, said, _ = run_main("", capsys, monkeypatch)
    assert code == 0 and any(line.startswith("loss") and line.endswith(" 2.000") for line in said)


def test_a_loss_that_has_not_fallen_is_an_error(capsys, monkeypatch):
    without_checks(monkeypatch)
    monkeypatch.setattr(single_gpu, "train_step", lambda *args: torch.tensor(4.0))
    code, said, _ = run_main("", capsys, monkeypatch)
    assert code == 1 and "loss, mean of the last ten steps: 4.000" in said[-1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_an_error_after_any_number_of_steps(bad, capsys, monkeypatch):
    without_checks(monkeypatch)
    for steps in (1, 60):
        losses = iter([4.0] * (steps - 1) + [bad])
        monkeypatch.setattr(single_gpu, "train_step", lambda *args, losses=losses: torch.tensor(next(losses)))
        code, said, _ = run_main(f"--steps {steps}", capsys, monkeypatch)
        assert code == 1 and said[-1].startswith("loss, mean of the last ten steps: "), (steps, said[-1])


@pytest.mark.parametrize("spoiled", ["nan", "kept_bytes", "peak_bytes", "flops"])
def test_a_wrong_number_and_nan_end_with_status_1_and_are_named(spoiled, capsys, monkeypatch):
    if spoiled == "nan":
        monkeypatch.setattr(single_gpu, "six_steps", lambda *args: [torch.tensor([1.0, math.nan])])
    else:
        formula = getattr(single_gpu, spoiled)
        off = (1, "nowhere") if spoiled == "peak_bytes" else 1
        monkeypatch.setattr(single_gpu, spoiled, lambda *args: off if spoiled == "peak_bytes" else formula(*args) + off)
    code, said, _ = run_main("--steps 1 --seq 8", capsys, monkeypatch)
    words = {"nan": "largest relative error", "kept_bytes": "bytes kept", "peak_bytes": "at the peak", "flops": "FLOPs"}
    assert code == 1 and words[spoiled] in said[-1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--steps 0", "--steps 0 must be 1 to"),
        ("--seq 3000000", "--seq 3000000 must be 1 to 4096"),
        ("--micro-batch -1", "--micro-batch -1 must be 1 to"),
        ("--micro-batches 1001", "--micro-batches 1001 must be 1 to 1000"),
        ("--seq nan", "--seq: invalid int value: 'nan'"),
        ("--seq", "--seq: expected one argument"),
        ("--recompute yes", "unrecognized arguments: yes"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it_and_exit_code_2(options, words, capsys, monkeypatch):
    code, said, complained = run_main(options, capsys, monkeypatch)
    assert code == 2 and said == []
    (line,) = complained.splitlines()
    assert line.startswith("single_gpu.py: ") and words in line


def test_under_torchrun_with_two_ranks_it_names_the_chapter_that_is_meant(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, said, complained = run_main("", capsys, monkeypatch)
    assert code == 2 and said == [] and "WORLD_SIZE 2" in complained and "02_data_parallel" in complained
