"""The ground floor of chapter 04 against an unsharded model written here, in_depth, and its own formulas."""

import ast
import itertools
import re
import shutil
import sys
from functools import cache
from pathlib import Path

import pytest
import tensor_parallel
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.house import files
from harness.meter import communication, held_bytes, peak_memory, saved_activations
from harness.oracle import assert_same, assert_same_named, error_between
from harness.programs import run_script
from harness.ranks import run_ranks
from tensor_parallel import (
    IGNORE,
    TINY,
    Products,
    Sizes,
    Sum,
    TensorParallel,
    block,
    cross_entropy,
    embed,
    formulas,
    loss_sum,
    piece_of,
    sum_shares,
    three_steps,
    whole_weights,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE / "in_depth"))

SMALL = Sizes(13, 16, 1, 4, 2, 24, 2, 6)  # 12 tokens, 13 words: 4 ranks hold 4 words each, and 3 that do not exist
FEW_WORDS = SMALL._replace(vocab=9, kv_heads=1)  # 3 words on a rank: rank 3 of 4 holds nothing but padding
BOTH = (False, True)  # without sequence parallelism, and with it


# -------------------------------------------------------------------------- the unsharded model, by torch's own modules


class Block(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        H, kv = sizes.hidden, sizes.kv_heads * sizes.hidden // sizes.heads
        self.norm1, self.norm2 = nn.RMSNorm(H, eps=1e-5), nn.RMSNorm(H, eps=1e-5)
        self.q, self.k, self.v, self.o = nn.Linear(H, H), nn.Linear(H, kv), nn.Linear(H, kv), nn.Linear(H, H)
        self.gate, self.up = nn.Linear(H, sizes.intermediate), nn.Linear(H, sizes.intermediate)
        self.down, self.head_dim = nn.Linear(sizes.intermediate, H), H // sizes.heads

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (p(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Whole(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.embed, self.head = (nn.Embedding(sizes.vocab, sizes.hidden) for _ in range(2))
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, eps=1e-5)
        self.double()
        with torch.no_grad():
            for name, value in whole_weights(sizes).items():
                self.named()[name].copy_(value)

    def named(self) -> dict[str, Tensor]:
        """By the names of the ground floor: blocks.0.q.bias is 0.q_bias."""
        short = {n: n.removeprefix("blocks.").removesuffix(".weight") for n, _ in self.named_parameters()}
        return {short[n].replace(".bias", "_bias"): p for n, p in self.named_parameters()}

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.blocks:
            x = layer(x)
        return F.cross_entropy((self.norm(x) @ self.head.weight.T).mT, labels, ignore_index=IGNORE)


def texts(sizes: Sizes) -> list[tuple[Tensor, Tensor]]:
    """The batches of `three_steps`, read from the same source by another road."""
    import tokenize

    data = [byte % sizes.vocab for byte in Path(tokenize.__file__).read_bytes()]
    S, batches = sizes.sequence, []
    for step in range(3):
        rows = [data[step * 500 + b * (S + 1) : step * 500 + (b + 1) * (S + 1)] for b in range(sizes.batch)]
        labels = [[IGNORE, *row[2:]] for row in rows]
        batches.append((torch.tensor([row[:-1] for row in rows]), torch.tensor(labels)))
    return batches


@cache
def unsharded(sizes: Sizes) -> list[dict[str, Tensor]]:
    """Gradients and loss of three steps of SGD, and the weights."""
    model, seen = Whole(sizes), []
    for tokens, labels in texts(sizes):
        model.zero_grad()
        loss = model.loss(tokens, labels)
        loss.backward()
        seen.append({n: p.grad.clone() for n, p in model.named().items()} | {"loss": loss.detach().view(1)})
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    return [*seen, {n: p.detach().clone() for n, p in model.named().items()}]


def cut(whole: dict[str, Tensor], sizes: Sizes, tp: TensorParallel, dtype=torch.float64) -> dict[str, Tensor]:
    return {name: piece_of(name, x, sizes, tp).to(dtype).requires_grad_() for name, x in whole.items()}


def my_piece(name: str, full: Tensor, sizes: Sizes, rank: int, t: int) -> Tensor:
    """What one of t ranks should hold of a tensor: said once more, by slices, so that `piece_of` is tested by it."""
    kind = name.rpartition(".")[2].removesuffix("_bias")
    if kind in ("k", "v"):
        D = sizes.hidden // sizes.heads
        each = max(1, sizes.kv_heads // t)  # heads on a rank
        first = rank * sizes.kv_heads // t
        return full[first * D : (first + each) * D]
    if kind in ("q", "gate", "up"):
        n = full.shape[0] // t
        return full[rank * n : (rank + 1) * n]
    if name.endswith((".o", ".down")):
        n = full.shape[1] // t
        return full[:, rank * n : (rank + 1) * n]
    if kind in ("embed", "head"):
        n = -(-sizes.vocab // t)
        mine = full[rank * n : (rank + 1) * n]
        return torch.cat((mine, mine.new_zeros(n - len(mine), full.shape[1])))
    return full


def trained(cases: list[Sizes], group: dist.ProcessGroup | None = None) -> list:
    """What three steps leave on this rank, for each case without sequence parallelism and with it."""
    ways = itertools.product(cases, [TensorParallel(group or dist.group.WORLD, sequence) for sequence in BOTH])
    return [three_steps(cut(whole_weights(sizes), sizes, tp), sizes, tp) for sizes, tp in ways]


def assert_unsharded(ranks: list, cases: list[Sizes]) -> None:
    """`ranks`: what `trained` returned on each rank of a group."""
    for rank, runs in enumerate(ranks):
        for (sizes, sequence), ours in zip(itertools.product(cases, BOTH), runs, strict=True):
            layout = "sequence" if sequence else "tensor"
            steps = zip(("step 0", "step 1", "step 2", "in the end"), ours, unsharded(sizes), strict=True)
            for when, got, want in steps:
                wanted = {name: my_piece(name, x, sizes, rank, len(ranks)) for name, x in want.items()}
                for name in [name for name in wanted if name.endswith("k_bias") and when != "in the end"]:
                    # What is added to all keys moves all scores of a query alike: the softmax, and the loss, do not
                    # see it.
                    assert max(wanted.pop(name).abs().max(), got.pop(name).abs().max()) < 1e-14, name
                assert_same_named(got, wanted, what=f"{layout} parallel, {when}", rank=rank)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_losses_gradients_and_weights_of_three_steps_equal_the_unsharded_model(ranks):
    cases = [TINY, SMALL, FEW_WORDS]
    assert_unsharded(run_ranks(ranks, trained, cases), cases)


def in_a_slice() -> list:
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    return trained([SMALL], groups[dist.get_rank() % 2])


def test_a_group_may_be_a_slice_of_the_world_whose_ranks_are_neither_first_nor_neighbours():
    zero, one, two, three = run_ranks(4, in_a_slice)
    for group in ([zero, two], [one, three]):  # in a group ranks are sorted, however they were named
        assert_unsharded(group, [SMALL])


def test_copies_of_a_key_value_head_have_the_sum_of_their_gradients_and_no_other_heads():
    assert_unsharded(run_ranks(4, trained, [SMALL]), [SMALL])  # ranks 0, 1 hold head 0, ranks 2, 3 hold head 1


def norm_gradients() -> tuple[list[Tensor], list[Tensor]]:
    tp = TensorParallel(dist.group.WORLD, sequence=True)
    w = cut(whole_weights(SMALL), SMALL, tp)
    loss_sum(w, *texts(SMALL)[0], SMALL, tp).backward()
    names = ["norm", "0.norm1", "0.norm2", "0.o_bias", "0.down_bias"]
    before = [w[name].grad.clone() for name in names]
    sum_shares(w, SMALL, tp)
    return before, [w[name].grad for name in names]


def test_norm_weights_and_row_biases_under_sequence_parallelism_are_summed_not_averaged():
    (first, summed), (second, again) = run_ranks(2, norm_gradients)
    for a, b, total, same in zip(first, second, summed, again, strict=True):
        assert not torch.equal(a, b), "the ranks saw the same tokens"
        assert_same(total, a + b, what="the gradient of a whole weight")
        assert torch.equal(total, same)


# ----------------------------------------------------------------------------------------------- the example in numbers


def two_by_two() -> list:
    rank, group = dist.get_rank(), dist.group.WORLD
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    A, B = torch.tensor([[1.0, 3.0], [2.0, 4.0]]), torch.tensor([[1.0, 0.0], [2.0, 1.0]])
    (y,) = Products.apply(x, TensorParallel(group, False), A[:, rank : rank + 1].T.contiguous(), None)
    share = y @ B[rank : rank + 1]
    z = Sum.apply(share, TensorParallel(group, False))
    dy, dx = torch.autograd.grad(z.sum(), (y, x))
    return [y.tolist(), share.tolist(), z.tolist(), dy.tolist(), dx.tolist()]


def test_the_example_in_numbers_is_what_two_ranks_compute():
    first, second = run_ranks(2, two_by_two)
    assert first == [[[5]], [[5, 0]], [[27, 11]], [[1]], [[10, 14]]]
    assert second == [[[11]], [[22, 11]], [[27, 11]], [[3]], [[10, 14]]]


def operators() -> None:
    rank, t = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(8.0).view(4, 2)
    for sequence in BOTH:
        tp = TensorParallel(dist.group.WORLD, sequence)
        rows = slice(rank * 4 // t, (rank + 1) * 4 // t) if sequence else slice(None)
        share = (whole + rank).requires_grad_()
        kept = share.detach().clone()
        z = Sum.apply(share, tp)
        assert_same(z, (t * whole + sum(range(t)))[rows], what="the sum of shares", rank=rank)
        assert torch.equal(share, kept), "the share was overwritten"
        z.backward(whole[rows].clone())
        assert_same(share.grad, whole, what="the gradient of a share", rank=rank)
        x = whole[rows].clone().requires_grad_()
        (y,) = Products.apply(x, tp, torch.eye(2), None)
        assert_same(y, whole, what="what enters the products", rank=rank)
        y.backward(whole * (rank + 1))
        assert_same(x.grad, (whole * sum(range(1, t + 1)))[rows], what="the gradient of x", rank=rank)


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_operator_moves_what_the_table_says_and_overwrites_nothing(ranks):
    run_ranks(ranks, operators)


# ----------------------------------------------------------------------------------------------- agreeing with in_depth


def both_floors() -> None:
    from parallel_block import Config, Parts, sync_replicated_gradients
    from parallel_linear import TensorParallel as Deep
    from parallel_linear import shards
    from parallel_llama import ParallelLlama, load_full_state_dict

    names = {"embed": "model.embed_tokens", "head": "lm_head", "norm": "model.norm"}
    parts = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    parts |= {n: f"self_attn.{n}_proj" for n in "qkvo"} | {n: f"mlp.{n}_proj" for n in ("gate", "up", "down")}
    names |= {f"{i}.{n}": f"model.layers.{i}.{long}" for i in range(TINY.layers) for n, long in parts.items()}
    whole = {n: x * 0 if n.endswith("_bias") else x for n, x in whole_weights(TINY).items()}  # the depth has no biases
    config = Config(TINY.vocab, TINY.hidden, TINY.layers, TINY.heads, TINY.kv_heads, TINY.intermediate)
    tokens, labels = texts(TINY)[0]
    for sequence in BOTH:
        tp = TensorParallel(dist.group.WORLD, sequence)
        w = cut(whole, TINY, tp)
        loss = loss_sum(w, tokens, labels, TINY, tp)
        loss.backward()
        sum_shares(w, TINY, tp)
        no_rope = Parts(rope=lambda x, cos, sin: x)
        model = ParallelLlama(config, Deep(dist.group.WORLD, sequence), no_rope).double()
        load_full_state_dict(model, {f"{long}.weight": whole[n] for n, long in names.items()})
        theirs = model.cross_entropy(model(tokens), labels)
        theirs.backward()
        sync_replicated_gradients(model, dist.group.WORLD)
        assert_same(loss, theirs, what="the loss of in_depth", rank=tp.rank)
        got = {n: w[n].grad for n in names}
        want = {n: model.get_parameter(f"{long}.weight").grad for n, long in names.items()}
        assert_same_named(got, want, what="gradient of in_depth", rank=tp.rank)
        assert len(shards(model)) == len(names)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_it_agrees_with_in_depth_about_loss_and_every_gradient(ranks):
    run_ranks(ranks, both_floors)


# ---------------------------------------------------------------------------------------------------------------- bytes


def bytes_of_a_rank(sizes: Sizes, sequence: bool) -> tuple:
    tp = TensorParallel(dist.group.WORLD, sequence)
    w = cut(whole_weights(sizes), sizes, tp)
    held = held_bytes(w.values())
    x = torch.randn(sizes.batch * sizes.sequence // (tp.t if sequence else 1), sizes.hidden, dtype=torch.float64)
    with communication() as wire, saved_activations(exclude=w.values()) as saved:
        z = block(x.requires_grad_(), w, 0, sizes, tp)
        kept = saved.bytes
        z.sum().backward()
    return (held.parameters, kept, wire.total), dict(wire.calls), tensor_parallel.measure(w, sizes, tp)


def test_weights_held_activations_kept_and_bytes_sent_are_those_of_the_formulas():
    for ranks, sizes in ((4, TINY), (4, SMALL), (2, SMALL), (1, SMALL)):
        for sequence in BOTH:
            for measured, calls, by_itself in run_ranks(ranks, bytes_of_a_rank, sizes, sequence):
                assert measured == by_itself == formulas(sizes, ranks, sequence)
                way = {"all_gather": 6, "reduce_scatter": 4} if sequence else {"all_reduce": 4}
                assert calls == way, f"messages of a block: {calls}"


def test_on_four_ranks_sequence_parallelism_keeps_a_quarter_and_tensor_parallelism_alone_does_not():
    one, whole, quarter = formulas(TINY, 1, False)[1], formulas(TINY, 4, False)[1], formulas(TINY, 4, True)[1]
    assert quarter * 4 == one and whole > 1.5 * quarter


def ends_of_the_model() -> None:
    t, T = dist.get_world_size(), 12
    tp = TensorParallel(dist.group.WORLD, False)
    rows = torch.randn(4, 16, dtype=torch.float64)
    with communication() as wire, peak_memory() as memory:
        cross_entropy(torch.zeros(T, 4, dtype=torch.float64), torch.arange(T), 13, tp)
    assert wire.total == 2 * (t - 1) * 3 * T * 8 // t, "three numbers for each token"
    assert memory.peak < 8 * T * 4 * 8, f"{memory.peak} bytes: were the logits gathered?"
    with communication() as wire:
        embed(torch.arange(T), rows, tp)
    assert wire.events == [("all_reduce", T * 16 * 8, t)]


def test_the_loss_sends_three_numbers_a_token_and_the_embedding_one_sum():
    run_ranks(4, ends_of_the_model)


def owns_its_piece() -> None:
    tp, whole = TensorParallel(dist.group.WORLD, True), whole_weights(SMALL)
    for name, full in whole.items():
        piece = piece_of(name, full, SMALL, tp)
        assert piece.untyped_storage().nbytes() == piece.nbytes, f"{name}: a view keeps the whole weight alive"
        assert piece.untyped_storage().data_ptr() != full.untyped_storage().data_ptr(), name


def test_a_piece_is_memory_of_its_own():
    run_ranks(1, owns_its_piece)
    run_ranks(2, owns_its_piece)


def memory_between_steps(sequence: bool) -> list[int]:
    tp = TensorParallel(dist.group.WORLD, sequence)
    w, alive = cut(whole_weights(SMALL), SMALL, tp), []
    with peak_memory() as memory:
        for step in range(12):
            tokens, labels = texts(SMALL)[0]
            loss_sum(w, tokens, labels, SMALL, tp).backward()
            sum_shares(w, SMALL, tp)
            if step % 2:
                with torch.no_grad():
                    loss_sum(w, tokens, labels, SMALL, tp)
            for p in w.values():
                p.grad = None
            del tokens, labels
            alive.append(memory.current)
    return alive


@pytest.mark.parametrize("sequence", BOTH)
def test_nothing_is_left_of_a_step_nor_of_a_forward_without_backward(sequence):
    for alive in run_ranks(2, memory_between_steps, sequence):
        # gloo's threads may drop a buffer a little later: what leaks is there after every step.
        assert min(alive[6:]) <= min(alive[:6]), f"bytes alive after each step: {alive}"


# --------------------------------------------------------------------------------------------------- loss and precision


def loss_of_my_words(full: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    tp, V = TensorParallel(dist.group.WORLD, False), full.shape[1]
    n = -(-V // tp.t)
    padded = F.pad(full, (0, n * tp.t - V), value=7000.0)  # what the rows of padding give is no concern
    mine = padded[:, tp.rank * n : (tp.rank + 1) * n].clone().requires_grad_()
    loss = cross_entropy(mine, labels, V, tp)
    loss.backward()
    return loss.detach(), mine.grad


def test_the_loss_survives_huge_logits_ignored_labels_and_words_that_do_not_exist():
    generator, labels, V = torch.Generator().manual_seed(0), torch.tensor([0, 8, IGNORE, 3, 4, IGNORE]), 9
    cases = ((1.0, 0.0), (50.0, 3000.0), (50.0, -3000.0))
    for (scale, shift), ranks in itertools.product(cases, (4, 2, 1)):
        full = (torch.randn(len(labels), V, generator=generator, dtype=torch.float64) * scale + shift).requires_grad_()
        want = F.cross_entropy(full, labels, ignore_index=IGNORE, reduction="sum")
        want.backward()
        n = -(-V // ranks)
        pieces = F.pad(full.grad, (0, n * ranks - V)).split(n, 1)
        for rank, (loss, grad) in enumerate(run_ranks(ranks, loss_of_my_words, full.detach(), labels)):
            assert_same(loss, want, what=f"the loss of logits around {shift}", rank=rank)
            assert_same(grad, pieces[rank], what="the gradient of logits", rank=rank)


def loss_of_bf16_logits() -> float:
    logits = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    labels = torch.arange(64)
    want = F.cross_entropy(logits.double(), labels, reduction="sum")
    tp = TensorParallel(dist.group.WORLD, False)
    mine = logits.chunk(tp.t, 1)[tp.rank].clone().requires_grad_()
    return error_between(cross_entropy(mine, labels, 256, tp), want)


def test_a_loss_of_bf16_logits_is_summed_in_fp32():
    assert max(run_ranks(2, loss_of_bf16_logits)) < 1e-5


def test_a_norm_in_bf16_takes_its_mean_in_fp32_and_rounds_once():
    """The dense run below has the same norm: it would err as much."""
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    weight = torch.ones(512, dtype=torch.bfloat16)
    want = F.rms_norm(x.double(), (512,), eps=1e-5).to(torch.bfloat16)
    assert (tensor_parallel.norm(x, weight) != want).float().mean() < 0.01  # fp32 may round some ties the other way


def test_weights_of_one_shape_are_different_weights():
    whole = whole_weights(TINY)
    by_shape: dict = {}
    for name, x in whole.items():
        assert not any(torch.equal(x, y) for y in by_shape.setdefault(x.shape, [])), name
        by_shape[x.shape].append(x)


def in_bf16(right: dict[str, Tensor], sequence: bool) -> dict[str, tuple[float, float]]:
    """For each weight, the error of its gradient in bf16: of this layout, and of one process in the same precision."""
    whole, (tokens, labels) = whole_weights(TINY), texts(TINY)[0]
    tp = TensorParallel(dist.group.WORLD, sequence)
    w = cut(whole, TINY, tp, torch.bfloat16)
    loss_sum(w, tokens, labels, TINY, tp).backward()
    sum_shares(w, TINY, tp)
    dense = {n: x.to(torch.bfloat16).requires_grad_() for n, x in whole.items()}
    loss_sum(dense, tokens, labels, TINY, None).backward()
    errors = {}
    for name, p in w.items():
        if name.endswith("k_bias"):  # zero, see above
            continue
        want = my_piece(name, right[name], TINY, tp.rank, tp.t)
        other = my_piece(name, dense[name].grad, TINY, tp.rank, tp.t)
        errors[name] = (error_between(p.grad, want), error_between(other, want))
    return errors


@pytest.mark.parametrize("sequence", BOTH)
def test_in_bf16_it_errs_at_most_half_as_much_again_as_one_process(sequence):
    model, (tokens, labels) = Whole(TINY), texts(TINY)[0]
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(torch.bfloat16))  # the same start: only the arithmetic may differ
    (model.loss(tokens, labels) * (labels != IGNORE).sum()).backward()
    right = {n: p.grad for n, p in model.named().items()}
    errors = run_ranks(4, in_bf16, right, sequence)
    ours, dense = (sum(e[i] for by_name in errors for e in by_name.values()) for i in (0, 1))
    assert ours <= 1.5 * dense, f"mean error {ours / dense:.2f} times the dense run's"
    worst = max(e for by_name in errors for e, _ in by_name.values())
    assert worst <= 0.1, f"a gradient is off by {worst:.2f}"


# -------------------------------------------------------------------------------------------------------- order in time


class Late:
    """A collective that delivers at wait() and not a moment before: its output is NaN until then."""

    def __init__(self, log: list, name: str, real, output: Tensor, *inputs: Tensor, **options):
        log.append(f"start {name}")
        self.log, self.name, self.output = log, name, output
        self.result = output.clone()
        options.pop("async_op")
        real(self.result, *inputs, **options)
        output.fill_(torch.nan)

    def wait(self):
        self.log.append(f"wait {self.name}")
        self.output.copy_(self.result)


class Log(TorchDispatchMode):
    def __init__(self, log: list):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._opname in ("mm", "addmm_", "addmm"):
            self.log.append("product")
        return func(*args, **(kwargs or {}))


def late_messages(sequence: bool) -> list[str]:
    log = []

    def late(name, real):
        return lambda *a, **k: Late(log, name, real, *a, **k) if k.get("async_op") else real(*a, **k)

    tp = TensorParallel(dist.group.WORLD, sequence)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(tp.rank * sequence), requires_grad=True)
    weights = [torch.randn(3, 6, requires_grad=True), torch.randn(2, 6, requires_grad=True)]
    ys = Products.apply(x, tp, *weights, None, None)
    parts = (dist.all_reduce, tensor_parallel.all_gather_single, tensor_parallel.reduce_scatter_single)
    try:
        dist.all_reduce = late("all-reduce", parts[0])
        tensor_parallel.all_gather_single = late("all-gather", parts[1])
        tensor_parallel.reduce_scatter_single = late("reduce-scatter", parts[2])
        with Log(log):
            torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    finally:
        dist.all_reduce, tensor_parallel.all_gather_single, tensor_parallel.reduce_scatter_single = parts
    for what, p in (("x", x), ("a weight", weights[0]), ("a weight", weights[1])):
        assert not p.grad.isnan().any(), f"the gradient of {what} used a message that had not arrived: {log}"
    return log


def test_the_gradient_of_x_travels_while_those_of_the_weights_are_computed():
    two = ["product"] * 2
    for log in run_ranks(2, late_messages, False):
        assert log == [*two, "start all-reduce", *two, "wait all-reduce"]
    for log in run_ranks(2, late_messages, True):
        assert log[:4] == ["start all-gather", *two, "start reduce-scatter"], log
        assert log[4:] == ["wait all-gather", *two, "wait reduce-scatter"], log


def accumulated() -> None:
    tp = TensorParallel(dist.group.WORLD, True)
    w, batches, single = cut(whole_weights(SMALL), SMALL, tp), texts(SMALL), []
    for batch in batches[:2]:
        one = cut(whole_weights(SMALL), SMALL, tp)
        loss_sum(one, *batch, SMALL, tp).backward()
        sum_shares(one, SMALL, tp)
        single.append({n: p.grad for n, p in one.items()})
        loss_sum(w, *batch, SMALL, tp).backward()
    sum_shares(w, SMALL, tp)
    both = {n: single[0][n] + single[1][n] for n in w if "k_bias" not in n}
    assert_same_named({n: w[n].grad for n in both}, both, what="gradient of")


def test_shares_accumulate_over_two_backwards_before_one_sum():
    run_ranks(4, accumulated)


# ------------------------------------------------------------------------------------------------ options and bad input


@pytest.mark.parametrize(
    ("argv", "ranks", "words"),
    [
        (["--kv-heads", "3"], "1", "--kv-heads: invalid choice: 3"),
        (["--kv-heads", "nan"], "1", "--kv-heads: invalid int value: 'nan'"),
        (["--layout", ""], "1", "--layout: invalid choice: ''"),
        (["--lay", "tensor"], "1", "--lay"),
        (["7"], "1", "7"),
        ([], "3", "--nproc_per_node 3 does not divide 8 query heads"),
        ([], "16", "--nproc_per_node 16 does not divide 8 query heads"),
    ],
)
def test_a_bad_option_is_one_line_that_names_it_before_any_process_group(argv, ranks, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tensor_parallel.py", *argv])
    monkeypatch.setenv("WORLD_SIZE", ranks)
    with pytest.raises(SystemExit) as end:
        tensor_parallel.main()
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == "" and not dist.is_initialized()
    assert words in said.err and said.err.startswith("tensor_parallel.py: ") and said.err.count("\n") == 1, said.err


def test_more_ranks_than_gpus_are_refused_and_do_not_fall_back_to_gloo(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tensor_parallel.py"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("a process group was started"))
    with pytest.raises(SystemExit) as end:
        tensor_parallel.main()
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "")
    assert said.err == "tensor_parallel.py: --nproc_per_node 4: there are 2 GPUs here; use 2 or less\n"


def makers_of_groups(file: Path) -> list[ast.Call]:
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    makers = ("init_process_group", "new_group", "new_subgroups_by_enumeration")
    return [call for call in calls if ast.unparse(call.func).rpartition(".")[2] in makers]


def test_no_group_of_this_chapter_is_left_with_the_default_time_limit_of_half_an_hour():
    found = {file.name: makers_of_groups(file) for file in files("*.py", HERE) if not file.name.startswith("test_")}
    assert {name for name, calls in found.items() if calls} >= {"tensor_parallel.py", "_tensor_parallel_demo.py"}
    for name, calls in found.items():
        for call in calls:
            assert "timeout" in [word.arg for word in call.keywords], f"{name}, line {call.lineno}: no timeout"


def words_out_of_range() -> None:
    tp = TensorParallel(dist.group.WORLD, False)
    w, (tokens, labels) = cut(whole_weights(SMALL), SMALL, tp), texts(SMALL)[0]
    for bad in (13, -1):
        for what, batch in (("tokens", (tokens.clone(), labels)), ("labels", (tokens, labels.clone()))):
            batch[what == "labels"][1, 3] = bad
            with pytest.raises(ValueError, match=f"{what} from .*{bad}.*words are 0 to 12"):
                loss_sum(w, *batch, SMALL, tp)
    labels.fill_(IGNORE)
    assert loss_sum(w, tokens, labels, SMALL, tp).item() == 0


def test_words_that_no_rank_has_are_an_error_and_not_a_plausible_loss():
    run_ranks(2, words_out_of_range)


def test_copied_alone_into_an_empty_folder_it_passes_and_says_what_it_measured(tmp_path):
    shutil.copy(HERE / "tensor_parallel.py", tmp_path)
    done = run_script(tmp_path / "tensor_parallel.py", "--kv-heads", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    *table, last = done.stdout.splitlines()
    assert last == "PASS" and len(table) == 8
    held = formulas(TINY._replace(kv_heads=4), 1, False)[0]
    assert re.search(rf"weights held +formula +{held:,} +measured +{held:,}", done.stdout)


def test_a_nan_is_no_pass_where_a_maximum_over_ranks_loses_it(monkeypatch, capsys):
    plain, reduced = tensor_parallel.three_steps, dist.all_reduce

    def spoiled(w, sizes, tp):
        seen = plain(w, sizes, tp)
        if tp is not None:
            seen[0]["loss"].fill_(torch.nan)
        return seen

    def as_nccl(tensor, op=dist.ReduceOp.SUM, **where):
        """With a rank whose numbers are all zero: the larger one, and of NaN and a number the number."""
        if op == dist.ReduceOp.MAX:
            tensor.copy_(torch.fmax(tensor, torch.zeros_like(tensor)))
        return reduced(tensor, op, **where)

    monkeypatch.setattr(sys, "argv", ["tensor_parallel.py", "--layout", "tensor"])
    monkeypatch.setattr(tensor_parallel, "three_steps", spoiled)
    monkeypatch.setattr(dist, "all_reduce", as_nccl)
    assert tensor_parallel.main() == 1
    assert capsys.readouterr().out.splitlines()[-1] == "tensor is off by inf"
