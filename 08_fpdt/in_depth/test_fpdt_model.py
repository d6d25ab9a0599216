"""A whole Llama in chunks against the same Llama in one piece; chapter 1's Llama is one of them."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _fpdt_demo import IGNORE, Llama, LlamaBlock, batch, rope_tables, settled
from fpdt_attention import Kernel, explicit_backward, explicit_forward, fpdt_attention, fpdt_positions
from fpdt_costs import Sizes, block_link_bytes, feed_forward_peak, link_bytes, loss_peak, model_host_peak
from fpdt_model import (
    Gradients,
    HostGradients,
    Pieces,
    chunked,
    chunked_loss,
    fpdt_block,
    loss_sum,
    main,
    use_fpdt,
)
from fpdt_store import CpuMachine, Race, Store, Watch
from harness.meter import peak_memory, saved_activations
from harness.programs import error_from, refusal
from harness.ranks import run_ranks
from harness.reference import Trace, assert_same, assert_same_trace, sgd_trace
from test_fpdt_store import FAKE, HERE, Forgetful, with_a_stand_in
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.append(str(Path(__file__).resolve().parents[2] / "01_single_gpu" / "in_depth"))

S, SIZES = 64, dict(vocab=64, hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48)


def valid_of(labels: Tensor) -> int:
    return int((labels != IGNORE).sum())


@cache
def reference() -> Trace:
    model = Llama(**SIZES).double()

    def backward(step: int) -> float:
        tokens, labels = batch(S, 64, step)
        loss = model.loss_sum(tokens, labels, torch.arange(S)) / valid_of(labels)
        loss.backward()
        return loss.item()

    return sgd_trace(dict(model.named_parameters()), backward)


def summed(model: nn.Module, loss: Tensor, group) -> float:
    """Gradients and loss summed over the group, as ZeRO over sequence and data ranks does."""
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    return total.item()


def trace_in_chunks(group, u: int, **options) -> Trace:
    store = Store(CpuMachine())
    model = use_fpdt(Llama(**SIZES).double(), u, group, store, **options)
    mine = fpdt_positions(S, group.rank(), group.size(), u)

    def backward(step: int) -> float:
        tokens, labels = batch(S, 64, step)
        loss = loss_sum(model, tokens[:, mine], labels[:, mine], mine, u) / valid_of(labels)
        return summed(model, loss, group)

    trace = sgd_trace(dict(model.named_parameters()), backward)
    assert store.host_bytes == 0, "something stayed on the host"
    return trace


CASES = [(1, "input", 2), (2, "attention", 1), (4, "input", 1), (8, "input", 2), (8, "attention", 2)]


def all_cases() -> list[Trace]:
    return [trace_in_chunks(dist.group.WORLD, u, keep=keep, finer=finer) for u, keep, finer in CASES]


@pytest.mark.prove
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_loss_every_gradient_and_weights_equal_the_whole_model_for_any_chunks(ranks):
    for rank, traces in enumerate(run_ranks(ranks, all_cases)):
        for got in traces:
            assert_same_trace(got, reference(), rank=rank)


def with_a_given_kernel() -> Trace:
    told = []
    kernel = Kernel(lambda *x, **how: told.append(how) or explicit_forward(*x, **how), explicit_backward)
    trace = trace_in_chunks(dist.group.WORLD, 4, kernel=kernel)
    assert told, "another kernel than the one that is given"
    return trace


def test_blocks_run_by_the_kernel_that_is_given():
    [got] = run_ranks(1, with_a_given_kernel)
    assert_same_trace(got, reference())


# ---------------------------------------------------------------------------------------- chapter 1's Llama, its names


def chapter_1() -> list[tuple[Trace, list[str]]]:
    from llama import TINY
    from llama import Llama as Chapter1

    group, found = dist.group.WORLD, []
    for u in (0, 4):
        model = Chapter1(replace(TINY, qk_norm=True)).double()
        names = list(model.state_dict())
        if u:
            use_fpdt(model, u, group, Store(CpuMachine()))
        mine = fpdt_positions(S, group.rank(), group.size(), u) if u else torch.arange(S)

        def backward(step: int, model=model, u=u, mine=mine) -> float:
            tokens, labels = (t[:, mine] for t in batch(S, 64, step))
            count = valid_of(batch(S, 64, step)[1])
            hidden = model.model(tokens, mine)
            if u:
                return summed(model, chunked_loss(hidden, model.lm_head.weight, labels, 8) / count, group)
            loss = model.parts.cross_entropy(model.lm_head(hidden), labels) / count
            loss.backward()
            return loss.item()

        found.append((sgd_trace(dict(model.named_parameters()), backward), names))
        assert list(model.state_dict()) == names
    return found


def test_chapter_1s_llama_trains_in_chunks_and_its_state_dict_keeps_its_names():
    for rank, ((want, _), (got, _)) in enumerate(run_ranks(2, chapter_1)):
        assert_same_trace(got, want, rank=rank)


# ------------------------------------------------------------------------------------------------- hooks of the others


def hooks() -> tuple[dict[str, int], list[str], list[str], bool]:
    """Of two sequences, with weights frozen, among them all of the second layer: how often hooks fire, which gradients
    are missing, which should be, and whether the others are right."""
    models = [Llama(**SIZES).double() for _ in range(2)]
    for model in models:
        for name, p in model.named_parameters():  # x of the first block needs no gradient, that of the second does
            p.requires_grad_(not any(part in name for part in ("q_proj", "embed", "layers.1.")))
    whole, model = models
    fired = {name: 0 for name, p in model.named_parameters() if p.requires_grad}
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    for name in fired:

        def count(*_, name=name) -> None:
            fired[name] += 1

        p = model.get_parameter(name)
        p.register_hook(count)
        p.register_post_accumulate_grad_hook(count)
    tokens, labels = (t.reshape(2, S // 2) for t in batch(S, 64, 0))
    whole.loss_sum(tokens, labels, torch.arange(S // 2)).backward()
    use_fpdt(model, 4, dist.group.WORLD, Store(CpuMachine()), keep="attention", finer=1)
    loss_sum(model, tokens, labels, torch.arange(S // 2), 4).backward()
    same = all(torch.allclose(model.get_parameter(name).grad, whole.get_parameter(name).grad) for name in fired)
    return fired, [name for name, p in model.named_parameters() if p.grad is None], frozen, same


def test_hooks_fire_once_for_each_parameter_and_a_frozen_weight_gets_no_gradient():
    [(fired, without, frozen, same)] = run_ranks(1, hooks)
    assert set(fired.values()) == {2}, fired
    assert without == frozen
    assert same


# --------------------------------------------------------------------------------------------------------------- bytes


def sizes_on(P: int) -> list[tuple[Sizes, str]]:
    cases = ((1, "input"), (4, "input"), (2, "attention"))
    return [(Sizes(64, P, u, 4, 2, 8, e=8), keep) for u, keep in cases]


def counted_all(P: int) -> list[tuple[int, int, int]]:
    return [counted(z, 32, keep) for z, keep in sizes_on(P)]


def counted(z: Sizes, H: int, keep: str) -> tuple[int, int, int]:
    store = Store(CpuMachine())
    model = Llama(vocab=64, hidden=H, layers=2, heads=z.heads, kv_heads=z.kv_heads, intermediate=H).double()
    use_fpdt(model, z.u, dist.group.WORLD, store, keep=keep)
    tokens, labels = batch(z.S, 64, 0)
    mine = fpdt_positions(z.S, dist.get_rank(), z.P, z.u)
    loss_sum(model, tokens[:, mine], labels[:, mine], mine, z.u).backward()
    return store.offloaded, store.fetched, store.host_peak


@pytest.mark.always("2")
@pytest.mark.parametrize("P", [1, 2])
def test_bytes_over_the_link_and_on_the_host_equal_the_formulas(P):
    for rank, found in enumerate(run_ranks(P, counted_all, P)):
        for (z, keep), got in zip(sizes_on(P), found, strict=True):
            link = tuple(2 * n for n in block_link_bytes(z, 32, keep))
            assert got == (*link, model_host_peak(z, 32, 2, keep)), f"{z}, {keep}, rank {rank}"


class FeedForward(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.pieces = Pieces(block)

    def forward(self, h: Tensor) -> Tensor:
        return self.pieces("feed_forward", h)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_peak_of_the_feed_forward_is_that_of_one_piece(dtype):
    e = dtype.itemsize
    for t, chunks, H, F in ((1024, 4, 16, 64), (512, 8, 16, 64), (1024, 2, 32, 96)):
        block = FeedForward(LlamaBlock(H, 4, 2, F).to(dtype))
        x, run = torch.randn(1, chunks * t, H, dtype=dtype), chunked(block, chunks)
        with torch.no_grad(), peak_memory() as forward:
            y = run(x)
        assert forward.peak - y.nbytes == feed_forward_peak(t, H, F, e, "forward"), (t, H, F)
        x.requires_grad_()
        with saved_activations(exclude=block.parameters()) as saved:
            y = run(x)
        assert saved.bytes == x.nbytes
        dy = torch.randn_like(y)
        sums = sum(p.nbytes for p in block.parameters())
        with peak_memory() as backward:
            y.backward(dy)
        assert backward.peak - x.nbytes - sums == feed_forward_peak(t, H, F, e, "backward"), (t, H, F)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_logits_of_one_piece_are_the_only_ones_and_the_peak_of_the_loss_is_exact(dtype):
    for t, chunks, H, V in ((64, 4, 32, 256), (32, 8, 32, 256), (64, 2, 64, 512)):
        hidden = torch.randn(1, chunks * t, H, dtype=dtype, requires_grad=True)
        weight = torch.randn(V, H, dtype=dtype, requires_grad=True)
        labels = torch.randint(V, (1, chunks * t))
        with peak_memory() as memory:
            chunked_loss(hidden, weight, labels, chunks)
        assert memory.peak == loss_peak(t, chunks * t, H, V, dtype.itemsize), (dtype, t, chunks, H, V)


def block_peaks(u: int, length: int) -> int:
    """Bytes that one layer's forward and backward take, beyond its weights' gradients and x, y, dy, dx."""
    block = LlamaBlock(32, 4, 2, 64).double()
    run = fpdt_block(block, u, dist.group.WORLD, Store(CpuMachine()), finer=4)
    x = torch.randn(1, length, 32, dtype=torch.float64, requires_grad=True)
    cos = torch.ones(length, 4)
    y = run(x, cos, cos)
    dy = torch.randn_like(y)
    with settled(), peak_memory() as memory:
        torch.autograd.grad(y, [x, *block.parameters()], dy)
    return memory.peak - x.nbytes - sum(p.nbytes for p in block.parameters())


@pytest.mark.prove
def test_a_blocks_peak_falls_with_chunks_and_stays_when_sequence_and_chunks_double():
    [a], [b], [c] = (run_ranks(1, block_peaks, u, length) for u, length in ((4, 512), (8, 1024), (8, 512)))
    assert b == a, "doubling the sequence and the chunks changes the memory of a block"
    assert c < 0.6 * a


# ------------------------------------------------------------------------------------------------------- loss, alone


def test_the_loss_is_a_sum_and_its_gradients_are_those_of_all_logits_at_once():
    make = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, 15, 8, generator=make).double(), torch.randn(33, 8, generator=make).double() * 9
    labels = torch.randint(33, (2, 15), generator=make)
    labels[:, :4] = IGNORE
    results = []
    for chunks in (0, 1, 4, 30):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if chunks:
            loss = chunked_loss(h, w, labels, chunks)
        else:
            logits = (h @ w.T).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")
        (loss * 0.25).backward()
        results.append((loss.detach(), h.grad, w.grad))
    for chunks, got in zip((1, 4, 30), results[1:], strict=True):
        for name, x, want in zip(("loss", "d hidden", "d weight"), got, results[0], strict=True):
            assert_same(x, want, what=f"{name} in {chunks} chunks")
    huge = chunked_loss(torch.full((1, 2, 1), 1e3), torch.tensor([[1.0], [2.0]]), torch.tensor([[1, 0]]), 2)
    assert huge.item() == 1000, "logits of 1000 and 2000, whose exp is infinite"


def test_a_rank_without_a_valid_label_has_loss_0_and_gradients_0(monkeypatch):
    h, w = torch.randn(1, 6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    loss = chunked_loss(h, w, torch.full((1, 6), IGNORE), 3)
    times = Tensor.mul_  # by a tensor without dimensions, which a GPU would round to the 16 bits of the other factor
    monkeypatch.setattr(Tensor, "mul_", lambda x, y: times(x, y) if y.dim() else pytest.fail("rounded on a GPU"))
    loss.backward()
    assert loss.item() == 0 and h.grad.abs().max() == 0 and w.grad.abs().max() == 0


def test_weight_gradients_are_summed_in_fp32_over_the_pieces_of_a_model_in_bf16():
    """Of 300 equal shares, a sum in bf16 has lost 44: from 256 on, adding 1 changes nothing."""
    module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    run, one = Gradients(module, trained=True), torch.ones(1, 1, dtype=torch.bfloat16)
    for _ in range(300):
        run.back([run.call(one)], [one], [])
    assert [x.item() for x in run.result()] == [300], run.sums
    assert run.result()[0].dtype == torch.bfloat16


def products(trained: bool) -> int:
    """Matrix products of a chunked loss in four chunks."""
    hidden, weight = torch.randn(1, 16, 8), torch.randn(32, 8, requires_grad=True)  # behind a frozen model
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(trained):
        loss = chunked_loss(hidden, weight, torch.randint(32, (1, 16)), 4)
    assert loss.requires_grad == trained
    return counter.get_total_flops() // (2 * 4 * 8 * 32)


def test_a_loss_that_nobody_will_go_back_through_makes_no_gradients():
    assert (products(False), products(True)) == (4, 12)


# ---------------------------------------------------------------------------------------------------------- bad input


def block_races(who: str, whom: str, keep: str) -> tuple[str, int]:
    """Of a block whose machine leaves out waits, found by what operators touch; no `compute` declares a thing."""
    machine = Forgetful(who, whom)
    store = Store(machine)
    store.compute = lambda *what, **more: None  # type: ignore[method-assign]
    x, tables = torch.randn(1, 32, 16, requires_grad=True), torch.ones(32, 2)
    with Watch(machine):
        try:
            run = fpdt_block(LlamaBlock(16, 4, 2, 24), 4, dist.group.WORLD, store, keep=keep)
            run(x, tables, tables).sum().backward()
        except Race as found:
            return str(found), 0
    return "no race", machine.clock["compute"]["compute"]


@pytest.mark.parametrize("keep", ["input", "attention"])
def test_inputs_that_come_back_from_the_host_are_watched_too_without_a_word_of_the_block(keep):
    for who, whom in (("compute", "fetch"), ("fetch", "compute")):
        [(found, _)] = run_ranks(1, block_races, who, whom, keep)
        assert "without waiting" in found, f"{who} did not wait for {whom}: {found}"
    [(found, seen)] = run_ranks(1, block_races, "nobody", "", keep)
    assert found == "no race" and seen > 100, (found, seen)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--seq", "100"], "--seq 100"),
        (["--chunks", "512"], "--chunks 512"),
        (["--seq", "8192", "--chunks", "4096"], "8,390,656 pairs"),
        (["--heads", "0"], "--heads 0"),
        (["--budget-mb", "5"], "--budget-mb 5"),
        (["--watch", "--budget-mb", "0"], "--budget-mb 0"),
        (["--seq", "0"], "--seq 0"),
        (["--seq", "132"], "use a multiple of 8 tokens"),
        (["--watch", "--seq", "65600"], "use a multiple of 128 tokens"),
        (["--watch", "--chunks", "3"], "--seq 65536 --chunks 3"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_2(arguments, named, monkeypatch):
    monkeypatch.setattr("fpdt_model.run", lambda *_, **__: pytest.fail(f"{' '.join(arguments)} is let through"))
    assert named in refusal(main, arguments)


def test_the_chunks_of_all_ranks_have_to_fit_on_the_host_and_only_one_rank_is_watched(monkeypatch):
    monkeypatch.setenv("HOST_MEMORY", "0.0002")  # GiB: of two ranks each alone would fit
    assert "the chunks on the host need 327,680 bytes and 214,748 are free" in refusal(main, "", world_size=2)
    assert "--watch on 2 ranks: it needs one" in refusal(main, "--watch", world_size=2)


@pytest.mark.prove
@with_a_stand_in
def test_where_there_is_a_gpu_the_cpu_still_plays_the_device_that_is_watched():
    command = [sys.executable, HERE / "fpdt_model.py", "--watch", "--seq", "2048", "--chunks", "8", "--budget-mb", "3"]
    done = subprocess.run(command, env=os.environ | FAKE, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "PASS", done.stdout + done.stderr[-900:]


def refusals() -> tuple[list[str], list[str], list[str]]:
    """What is said to other options, to autocast, and to dropout, which in a validation is none."""
    group, x, rest = dist.group.WORLD, torch.ones(1, 8, 32), rope_tables(torch.arange(8), 8)
    block, options, autocast, dropout = LlamaBlock(32, 4, 2, 48), [], [], []

    def calls(module: nn.Module) -> list[tuple]:
        return [(chunked(module, 2), x), (fpdt_block(block, 2, group, Store(CpuMachine())), x, *rest)]

    for chunks, more in ((3, {}), (2, {"finer": 5}), (2, {"keep": "all"})):
        make = lambda u=chunks, more=more: fpdt_block(block, u, group, Store(CpuMachine()), **more)(x, *rest)  # noqa: E731
        options.append(error_from(ValueError, make))
    with torch.autocast("cpu", torch.bfloat16):
        autocast += [error_from(ValueError, *call) for call in calls(block.input_layernorm)]
    block.mlp = nn.Sequential(block.mlp, nn.Dropout(0.5))
    dropout += [error_from(ValueError, *call) for call in calls(block.mlp)]
    block.mlp[1].p = 0.0
    assert_same(chunked(block.mlp, 3)(x), block.mlp(x), 1e-6)  # 8 tokens in pieces of 3, 3 and 2
    block.mlp[1].p = 0.5
    block.eval()
    assert_same(chunked(block.mlp, 2)(x), block.mlp(x), 1e-6)
    return options, autocast, dropout


def test_options_autocast_and_dropout_that_a_backward_in_chunks_would_not_know_are_refused():
    [((chunks, pieces, keep), autocast, dropout)] = run_ranks(1, refusals)
    assert chunks.startswith("8 tokens of a rank do not divide into 3 chunks")
    assert "5 pieces" in pieces
    assert "'all' must be input or attention" in keep
    known = "what runs in chunks knows no autocast: backward runs it again without; use a model in bf16"
    assert autocast == [known, known]
    assert all("knows no dropout" in line for line in dropout)


def second_derivatives() -> list[str]:
    block, group, store, found = LlamaBlock(32, 4, 2, 48), dist.group.WORLD, Store(CpuMachine()), []
    x = torch.ones(1, 8, 32, requires_grad=True)
    q = x.unflatten(-1, (4, 8))
    for y in (
        chunked(block.input_layernorm, 2)(x),
        fpdt_block(block, 2, group, store)(x, *(table[None] for table in rope_tables(torch.arange(8), 8))),
        chunked_loss(x, torch.ones(5, 32), torch.ones(1, 8, dtype=torch.long), 2),
        fpdt_attention(group, 2, store)(q, q, q, causal=True),
    ):
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        found.append(error_from(RuntimeError, dx.sum().backward))
    return found


def test_a_second_derivative_is_refused():
    assert all("once_differentiable" in said for said in run_ranks(1, second_derivatives)[0])


def bytes_waiting(keep: str) -> list[tuple[int, int, float]]:
    """On the host (in use, allocated) and, of a forward, bytes offloaded: before, validations, forwards thrown away.
    The machine writes nothing of it down."""
    store = Store(CpuMachine())
    model = use_fpdt(Llama(**SIZES).double(), 4, dist.group.WORLD, store, keep=keep)
    tokens, labels = batch(S, 64, 0)
    seen = []
    for times, grad in ((1, True), (3, False), (3, True)):
        offloaded = 0
        for _ in range(times):
            before = store.offloaded
            with torch.set_grad_enabled(grad):
                loss = loss_sum(model, tokens, labels, torch.arange(S), 4)
            offloaded += store.offloaded - before
            if times == 1:
                loss.backward()
            del loss
        seen.append((store.host_bytes, store.allocated, offloaded / times))
    assert store.machine.ops == [], "a training on a CPU keeps a record of all it has done"
    return seen


@pytest.mark.always("attention")
@pytest.mark.parametrize("keep", ["input", "attention"])
def test_validations_and_abandoned_forwards_leave_not_a_byte_on_the_host_and_no_record(keep):
    [seen] = run_ranks(1, bytes_waiting, keep)
    assert {held for held, _, _ in seen} == {0}, f"bytes still in use after a step, validations, forwards: {seen}"
    assert len({allocated for _, allocated, _ in seen}) == 1, f"the pool of host buffers grew: {seen}"
    z, layers = Sizes(S, 1, 4, SIZES["heads"], SIZES["kv_heads"], 8, e=8), SIZES["layers"]
    x, attention = S * SIZES["hidden"] * 8, link_bytes(z, "forward, kept" if keep == "attention" else "forward")[0]
    validation, forward = layers * link_bytes(z, "forward")[0], layers * (x + attention)
    assert [offloaded for *_, offloaded in seen] == [forward, validation, forward], "a validation keeps nothing but K/V"


def gradients_on_the_host() -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Of two micro-batches: this rank's pieces, those of an ordinary training, and bytes."""
    group, P = dist.group.WORLD, dist.get_world_size()
    mine, store = fpdt_positions(S, group.rank(), P, 4), Store(CpuMachine())
    models = [use_fpdt(Llama(**SIZES).double(), 4, group, Store(CpuMachine())) for _ in range(2)]
    home = HostGradients(models[0], group, store)
    for model in models:
        for step in range(2):
            tokens, labels = batch(S, 64, step)
            (loss_sum(model, tokens[:, mine], labels[:, mine], mine, 4) / valid_of(labels)).backward()
            assert model is models[1] or all(p.grad is None for p in model.parameters()), "a gradient stays"
    waiting, pieces, want = store.host_bytes, home.take(), []
    for p in models[1].parameters():
        dist.all_reduce(p.grad, group=group)
        want.append(nn.functional.pad(p.grad.flatten(), (0, -p.numel() % P)).chunk(P)[group.rank()])
    got = [pieces[p] for p in models[0].parameters()]
    return got, want, [store.offloaded, store.fetched, waiting, store.host_bytes]


@pytest.mark.always("1")
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_leave_for_the_host_as_they_are_made_summed_over_ranks_and_micro_batches(ranks):
    for rank, (got, want, counted) in enumerate(run_ranks(ranks, gradients_on_the_host)):
        for n, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_same(a, b, what=f"gradient {n}", rank=rank)
        size = sum(x.nbytes for x in got)  # 1/P of all weights, rounded up
        assert counted == [2 * size, size, size, 0], "out twice, back once, and none left"


def small_and_large() -> tuple[Tensor, int]:
    """The gradient of rank 0 is 1, that of rank 1 is less than bf16 sees beside it; the bias is frozen."""
    layer = nn.Linear(5, 3).bfloat16()
    layer.bias.requires_grad_(False)
    home = HostGradients(layer, dist.group.WORLD, Store(CpuMachine()))
    (layer(torch.eye(5).bfloat16()) * (2.0**-9 if dist.get_rank() else 1)).sum().backward()
    pieces = home.take()
    layer(torch.eye(5).bfloat16()).sum().backward()  # what was taken must survive the next step
    again = home.take()
    storages = {x.untyped_storage().data_ptr() for x in (*pieces.values(), *again.values())}
    assert len(storages) == len(pieces) + len(again), "two steps' gradients share memory"
    return pieces[layer.weight], len(pieces)


def test_ranks_sum_the_gradients_of_a_bf16_model_in_fp32_and_a_frozen_weight_has_none():
    for rank, (got, count) in enumerate(run_ranks(2, small_and_large)):
        assert got.dtype == torch.float32
        want = nn.functional.pad(torch.full((15,), 1 + 2.0**-9), (0, 1)).chunk(2)[rank]
        assert_same(got, want, 0.0, "the sum", rank)
        assert count == 1, "of the weight alone"


def gradient_race(who: str, whom: str) -> str:
    layer, machine = nn.Linear(4, 4), Forgetful(who, whom)
    home = HostGradients(layer, dist.group.WORLD, Store(machine))
    try:
        with Watch(machine):
            for _ in range(2):
                layer(torch.ones(2, 4)).sum().backward()
    except Race as found:
        return str(found)
    return f"no race, and {len(home.take())} pieces"


def test_a_gradient_that_does_not_wait_for_the_one_that_comes_back_is_a_race():
    for who, whom in (("offload", "compute"), ("fetch", "offload"), ("compute", "fetch")):
        assert "without waiting" in run_ranks(1, gradient_race, who, whom)[0], (who, whom)
    assert run_ranks(1, gradient_race, "nobody", "") == ["no race, and 2 pieces"]
