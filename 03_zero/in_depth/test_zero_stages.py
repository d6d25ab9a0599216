"""Stages 1 and 2 against one reference: the unsharded model on the whole global batch, in one process."""

import gc
import importlib
import weakref
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _zero_demo import IGNORE, Decoder, make_batch, token_loss_sum, train_step, valid_tokens
from harness.meter import communication, held_bytes, peak_memory, storage_bytes
from harness.programs import error_from, refusal
from harness.ranks import run_ranks
from harness.reference import Trace, assert_same, assert_same_named, assert_same_trace, assert_same_traces, sgd_trace
from torch import Tensor, nn
from zero_memory import bytes_per_parameter, bytes_sent
from zero_stages import ExchangeAndSum, SendToAll, Zero1, Zero2, main

STAGES = [1, 2]
SMALL = 40_000  # bytes of a bucket: several buckets, some with many parameters


def decoder(seed: int = 0, dtype: torch.dtype = torch.float64, **options) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(hidden=23, heads=1, layers=2, **options).to(dtype)


def awkward(seed: int = 0) -> Decoder:
    """Tied embedding, a frozen matrix, a parameter that is never used, and one with fewer elements than ranks."""
    model = decoder(seed, tied=True)
    model.layers[0].up.weight.requires_grad_(False)
    model.layers[1].never = nn.Parameter(torch.ones(5, dtype=torch.float64))
    model.lonely = nn.Parameter(torch.ones((), dtype=torch.float64))
    return model


def sharded(stage: int, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup, **options):
    return {1: Zero1, 2: Zero2}[stage](model, optimizer, group, **{"bucket_bytes": SMALL, **options})


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def in_two_groups(model: nn.Module, **options) -> torch.optim.AdamW:
    """AdamW as one really uses it: no weight decay for vectors, and a learning rate of their own."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups, **{"lr": 1e-2, **options})


def mean_loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """The reference's own loss: PyTorch's mean over valid tokens, not the sum and division of the script."""
    return F.cross_entropy(model(tokens).flatten(0, 1).double(), labels.flatten(), ignore_index=IGNORE)


def whole_batch(step: int, ranks: int, micro_batches: int = 2) -> tuple[Tensor, Tensor]:
    parts = [pair for part in make_batch(step, ranks, micro_batches) for pair in part]
    tokens, labels = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
    valid = labels[:, :-1] != IGNORE
    assert torch.equal(labels[:, :-1][valid], tokens[:, 1:][valid]), "a label is the token after it"
    return tokens, labels


def reference_trace(
    ranks: int, build: Callable[..., nn.Module] = decoder, seed: int = 0, micro_batches: int = 2
) -> Trace:
    model = build(seed)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def backward(step: int) -> float:
        loss = mean_loss(model, *whole_batch(step, ranks, micro_batches))
        loss.backward()
        for p in trained.values():  # an unused parameter has gradient zero here
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        return loss.item()

    trace = sgd_trace(trained, backward)
    trace.weights = {name: p.detach() for name, p in model.named_parameters()}  # the frozen ones too
    return trace


def zero_trace(
    make: Callable[..., Zero1],
    group: dist.ProcessGroup,
    build: Callable[..., nn.Module] = decoder,
    seed: int = 0,
    micro_batches: int = 2,
    first: int = 0,
) -> Trace:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    model = build(seed + 100 * rank)  # other weights on each rank: those of the group's rank 0 must win
    zero = make(model, sgd(model), group)
    trace = Trace()
    for step in range(3):
        batch = make_batch(first + step, ranks, micro_batches)[rank]
        trace.losses.append(train_step(model, zero, batch, everyone=group).item())
        trace.gradients.append(zero.full_gradients())
        zero.step()
    trace.weights = zero.full_weights()
    return trace


def at_each_stage(what: Callable, *given) -> list:
    return [what(stage, *given) for stage in STAGES]


# ---------------------------------------------------------------------------------------------- the one reference


def traces(build: Callable[..., nn.Module] = decoder, micro_batches: int = 2) -> list[Trace]:
    world = dist.group.WORLD
    return [zero_trace(lambda *a, s=s: sharded(s, *a), world, build, micro_batches=micro_batches) for s in STAGES]


@pytest.mark.always("3")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_loss_gradients_and_weights_after_three_steps_equal_the_unsharded_model(ranks):
    assert_same_traces(run_ranks(ranks, traces), reference_trace(ranks))


def traces_by_exchange() -> list[Trace]:
    world = dist.group.WORLD
    options = {"reduce_scatter": ExchangeAndSum, "all_gather": SendToAll}
    return [zero_trace(lambda *a, s=s: sharded(s, *a, **options), world, micro_batches=3) for s in STAGES]


@pytest.mark.prove
def test_point_to_point_gives_what_the_collectives_give():
    assert_same_traces(run_ranks(3, traces_by_exchange), reference_trace(3, micro_batches=3))


def sent_and_result(message: type, out: Tensor, given: Tensor, waits: bool = True) -> tuple[float, Tensor]:
    with communication() as sent:
        work = message(out, given, group=dist.group.WORLD, async_op=waits)
        if waits:
            work.wait()
    return sent.total, out.clone()


def exchanges() -> list[tuple[float, Tensor]]:
    """Each in place, as in a bucket; then the same terms in each slice, so that each rank sums the same."""
    rank, found = dist.get_rank(), []
    mine = slice(4 * rank, 4 * rank + 4)
    flat = torch.arange(12.0) + rank
    found.append(sent_and_result(ExchangeAndSum, flat[mine], flat))
    flat = torch.zeros(12)
    flat[mine] = rank + 1
    found.append(sent_and_result(SendToAll, flat, flat[mine]))
    found.append(sent_and_result(SendToAll, torch.zeros(12), torch.full((4,), rank + 1.0), waits=False))  # as stage 3
    terms = torch.randn(50, generator=torch.Generator().manual_seed(rank))
    for dtype in (torch.float32, torch.bfloat16):
        given = terms.to(dtype).repeat(3)
        found.append(sent_and_result(ExchangeAndSum, given.new_empty(50), given, waits=False))
        assert torch.equal(given, terms.to(dtype).repeat(3)), "what is summed was overwritten"
    return found


def test_exchanges_send_and_give_what_collectives_do_and_the_same_bits_whichever_rank_sums():
    results = run_ranks(3, exchanges)
    terms = [torch.randn(50, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    for rank, (summed, gathered, apart, *bits) in enumerate(results):
        assert summed[0] == gathered[0] == 48 * 2 / 3
        assert summed[1].tolist() == [3.0 * (4 * rank + i) + 3 for i in range(4)]
        assert gathered[1].tolist() == apart[1].tolist() == [1.0] * 4 + [2.0] * 4 + [3.0] * 4
        for (_, got), dtype in zip(bits, (torch.float32, torch.bfloat16), strict=True):
            want = sum(term.to(dtype).float() for term in terms).to(dtype)
            assert torch.equal(got, want), "in the order of the ranks, in fp32, and rounded once"


def test_frozen_tied_unused_and_tiny_parameters_train_as_in_the_unsharded_model():
    assert_same_traces(run_ranks(3, traces, awkward), reference_trace(3, awkward))


def test_three_micro_batches_count_as_one_batch():
    assert_same_traces(run_ranks(2, traces, decoder, 3), reference_trace(2, micro_batches=3))


def two_slices() -> list[Trace]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = dist.get_rank() % 2
    return [zero_trace(lambda *a, s=s: sharded(s, *a), groups[mine], seed=mine) for s in STAGES]


@pytest.mark.prove
def test_two_slices_of_the_world_train_two_models_at_the_same_time():
    want = [reference_trace(2, seed=mine) for mine in (0, 1)]
    for rank, results in enumerate(run_ranks(4, two_slices)):
        for got in results:
            assert_same_trace(got, want[rank % 2], rank=rank)


# --------------------------------------------------------------------------------------------- optimizers and clipping


def schedule(options: dict) -> None:
    """Every option that a schedule may change, not the learning rate alone."""
    options["lr"] *= 0.7
    options["weight_decay"] = 0.5 * options["weight_decay"] + 0.03
    if "betas" in options:
        options["betas"] = tuple(0.9 * beta for beta in options["betas"])
    if "momentum" in options:
        options["momentum"] *= 0.8


def unsharded_steps(optimizer: torch.optim.Optimizer, model: nn.Module, ranks: int, max_norm: float) -> list[float]:
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        mean_loss(model, *whole_batch(step, ranks)).backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None and p.requires_grad else p.grad
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        for options in optimizer.param_groups:
            schedule(options)
        optimizer.step()
    return norms


def sharded_steps(make: Callable[..., Zero1], optimizer_of: Callable, model: nn.Module, max_norm: float):
    group = dist.group.WORLD
    rank, ranks = dist.get_rank(), dist.get_world_size()
    zero = make(model, optimizer_of(model), group)
    norms = []
    for step in range(4):
        train_step(model, zero, make_batch(step, ranks)[rank])
        norms.append(zero.clip_grad_norm(max_norm).item())
        zero.clip_grad_norm(2 * max_norm)  # it is shorter now
        for options in zero.param_groups:
            schedule(options)
        zero.step()
    return norms, zero.full_weights()


def with_momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def all_stages_with(optimizer_of: Callable, max_norm: float):
    return [sharded_steps(lambda *a, s=s: sharded(s, *a), optimizer_of, awkward(), max_norm) for s in STAGES]


def assert_clipped_as_by_torch(results, optimizer_of=in_two_groups) -> None:
    """The norms and weights of three ranks are those of four steps of torch, clipped at 0.5."""
    model = awkward()
    norms = unsharded_steps(optimizer_of(model), model, 3, max_norm=0.5)
    assert max(norms) > 0.5  # or nothing would be clipped
    want = {name: p.detach() for name, p in model.named_parameters()}
    for rank, (got_norms, got) in enumerate(results):
        assert_same(torch.tensor(got_norms), torch.tensor(norms), 1e-9, "gradient norm", rank)
        assert_same_named(got, want, 1e-9, "weight", rank)


@pytest.mark.always("in_two_groups")
@pytest.mark.parametrize("optimizer_of", [in_two_groups, with_momentum])
def test_four_clipped_steps_with_a_schedule_equal_those_of_torch(optimizer_of):
    for of_a_stage in zip(*run_ranks(3, all_stages_with, optimizer_of, 0.5), strict=True):
        assert_clipped_as_by_torch(of_a_stage, optimizer_of)


class AdamWInOneGo:
    """What chapter 09's `adamw_` computes, without a kernel and in any dtype; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, p, g, m, v, *, step, lr, betas, eps, weight_decay, scale, copy) -> None:
        self.calls += 1
        g = g.to(p.dtype) * (1 if scale is None else scale)
        if scale is not None and scale.isnan():
            return
        m.mul_(betas[0]).add_(g, alpha=1 - betas[0])
        v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
        p.mul_(1 - lr * weight_decay)
        p.addcdiv_(m, (v / (1 - betas[1] ** step)).sqrt() + eps, value=-lr / (1 - betas[0] ** step))
        if copy is not None:
            copy.copy_(p)


def fused_steps(max_norm: float) -> list[tuple[list[float], dict[str, Tensor], int, int]]:
    """Norms, weights, kernels and buckets at each stage."""
    found = []
    for stage in STAGES:
        one_go = AdamWInOneGo()
        kept = []
        make = lambda *a, s=stage, f=one_go, k=kept: k.append(sharded(s, *a, fused=f)) or k[-1]  # noqa: E731
        norms, weights = sharded_steps(make, in_two_groups, awkward(), max_norm)
        found.append((norms, weights, one_go.calls, len(kept[0].buckets)))
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_fused_adamw_over_flat_buffers_takes_the_same_clipped_steps_and_on_one_rank_one_kernel_for_a_group(ranks):
    model = awkward()
    norms = unsharded_steps(in_two_groups(model), model, ranks, max_norm=0.5)
    want = {name: p.detach() for name, p in model.named_parameters()}
    for rank, results in enumerate(run_ranks(ranks, fused_steps, 0.5)):
        for stage, (got_norms, got, kernels, buckets) in zip(STAGES, results, strict=True):
            assert_same(torch.tensor(got_norms), torch.tensor(norms), 1e-9, "gradient norm", rank)
            assert_same_named(got, want, 1e-9, "weight", rank)
            assert kernels == 4 * buckets
            assert (buckets == 2) == (ranks == stage == 1), "otherwise buckets leave while backward runs"


def left_out(stage: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """A bf16 model's weights and states before a step that is left out, after it, and after one that is not."""
    model = decoder(dtype=torch.bfloat16)
    zero = sharded(stage, model, in_two_groups(model), dist.group.WORLD, master=torch.float32, fused=AdamWInOneGo())
    batch, seen = make_batch(0, dist.get_world_size())[dist.get_rank()], []
    for broken in (False, True, False):
        train_step(model, zero, batch)
        zero.leave_out_if(torch.tensor(broken))
        zero.step()
        states = [value for state in zero.state.values() for kind, value in state.items() if kind != "step"]
        seen.append(zero.full_weights() | {str(i): value.clone() for i, value in enumerate(states)})
    masters = torch.cat([m.bfloat16() for m in zero.masters])
    return seen, {"weights": torch.cat([zero.weight_shard(i) for i in range(len(zero.buckets))]), "masters": masters}


def test_the_device_can_leave_a_step_out_and_a_fused_step_writes_the_models_weights_too():
    for stages in run_ranks(2, at_each_stage, left_out):
        for (first, second, third), last in stages:
            assert all(torch.equal(first[name], second[name]) for name in first)
            assert not any(torch.equal(first[name], third[name]) for name in ("embed.weight", "0"))
            assert torch.equal(last["weights"], last["masters"])


def norm_and_pieces(stage: int) -> tuple[float, dict[str, int], int, bool]:
    """The norm; elements of each gradient on this rank; padding; whether clipping far above the norm changes any."""
    model = decoder()
    zero = sharded(stage, model, sgd(model), dist.group.WORLD)
    train_step(model, zero, make_batch(0, dist.get_world_size())[dist.get_rank()])
    pieces: dict[str, int] = {}
    for name, piece in zero.gradient_pieces():
        pieces[name] = pieces.get(name, 0) + piece.numel()
    before = zero.full_gradients()
    zero.finish()  # micro_batch(last=True) has done it
    norm, after = zero.clip_grad_norm(1e9).item(), zero.full_gradients()
    changed = any(not torch.equal(after[name], before[name]) for name in before)
    return norm, pieces, sum(b.padded - b.numel for b in zero.buckets), changed


def test_the_ranks_together_own_each_element_once_and_no_padding():
    model = decoder()
    mean_loss(model, *whole_batch(0, 4)).backward()
    want = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    for results in zip(*run_ranks(4, at_each_stage, norm_and_pieces), strict=True):
        assert results[0][2] > 0  # there is padding that could be counted
        for rank, (norm, _, _, changed) in enumerate(results):
            assert_same(norm, want, what="norm", rank=rank)
            assert not changed, "a gradient shorter than the limit is left alone"
        for name, p in model.named_parameters():
            assert sum(pieces.get(name, 0) for _, pieces, *_ in results) == p.numel(), name


# ------------------------------------------------------------------------------------------------------ accumulation


def accumulated(stage: int, plan: str) -> dict[str, Tensor]:
    """Three micro-batches; the last leaves layer 1's MLP out, so its gradient comes from the earlier ones alone."""
    model, rank = decoder(), dist.get_rank()
    zero = sharded(stage, model, sgd(model), dist.group.WORLD)
    batch = make_batch(0, dist.get_world_size(), 3)[rank]
    valid = valid_tokens(batch, dist.group.WORLD)
    zero.zero_grad()
    for i, (tokens, labels) in enumerate(batch):
        loss = loss_without_an_mlp(model, tokens, labels, i) / valid
        if plan == "no_sync" and i < 2:
            with zero.no_sync():
                with zero.no_sync():
                    pass  # its end does not end the outer one
                loss.backward()
        else:
            with zero.micro_batch(last=i == 2):
                loss.backward()
    return zero.full_gradients()


def loss_without_an_mlp(model: Decoder, tokens: Tensor, labels: Tensor, i: int) -> Tensor:
    x = model.layers[0](model.embed(tokens))
    if i < 2:
        x = model.layers[1](x)
    logits = model.head(model.norm(x)).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")


def accumulated_by_each_plan() -> list[dict[str, Tensor]]:
    return [accumulated(stage, plan) for stage, plan in ((1, "no_sync"), (2, "no_sync"), (2, "reduce each"))]


def test_gradients_add_up_over_micro_batches_although_the_last_one_uses_fewer_parameters():
    model = decoder()
    batch = make_batch(0, 2, 3)
    valid = sum((y != IGNORE).sum() for part in batch for _, y in part)
    for part in batch:
        for i, (x, y) in enumerate(part):
            (loss_without_an_mlp(model, x, y, i) / valid).backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    for rank, plans in enumerate(run_ranks(2, accumulated_by_each_plan)):
        for got in plans:
            assert_same_named(got, want, what="gradient of", rank=rank)


def used_on_one_rank_only(stage: int) -> dict[str, Tensor]:
    model, rank = decoder(), dist.get_rank()
    zero = sharded(stage, model, sgd(model), dist.group.WORLD)
    (batch,) = make_batch(0, dist.get_world_size(), 1)[rank]
    for unused in (False, bool(rank)):  # first everyone uses everything, and leaves its sum behind
        zero.zero_grad()
        with zero.micro_batch(last=True):
            loss_without_an_mlp(model, *batch, i=2 if unused else 0).backward()
    return zero.full_gradients()


def test_a_parameter_that_only_one_rank_used_gets_that_ranks_gradient():
    model = decoder()
    for rank, part in enumerate(make_batch(0, 3, 1)):
        loss_without_an_mlp(model, *part[0], i=2 if rank else 0).backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    for rank, stages in enumerate(run_ranks(3, at_each_stage, used_on_one_rank_only)):
        for got in stages:
            assert_same_named(got, want, what="gradient of", rank=rank)


def backward_twice(stage: int) -> str:
    model = decoder()
    zero = sharded(stage, model, sgd(model), dist.group.WORLD)
    batch = make_batch(0, 1)[0]
    train_step(model, zero, batch)
    if stage == 2:  # may add a further micro-batch, but has to finish() before the next
        mean_loss(model, *batch[0]).backward()
    return error_from(RuntimeError, mean_loss(model, *batch[0]).backward)


def test_stage_1_refuses_to_reduce_twice_in_a_step_and_stage_2_without_finish():
    for said in run_ranks(1, at_each_stage, backward_twice)[0]:
        assert "became final twice" in said and "no_sync" in said


# --------------------------------------------------------------------------------------------------- bytes, exactly


def padded(model: nn.Module, ranks: int) -> int:
    """Elements, when all parameters are one bucket."""
    return -(-sum(p.numel() for p in model.parameters()) // ranks) * ranks


def bytes_of_a_step(make: Callable[..., Zero1], dtype: torch.dtype = torch.bfloat16) -> dict[str, float]:
    """Everything that one AdamW step leaves in memory and sends, seen from outside."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batch = make_batch(0, ranks)[rank]
    with peak_memory() as memory:
        model = decoder(dtype=dtype)
        zero = make(model, torch.optim.AdamW(model.parameters()), dist.group.WORLD)
        with communication() as sent:
            train_step(model, zero, batch)
            zero.step()
        counters = sum(v.nbytes for state in zero.state.values() for v in state.values() if v.dim() == 0)
        alive = memory.current - counters
    held = held_bytes(model, zero)
    return {
        "alive": alive,
        "weights": held.parameters,
        "states": held.optimizer,
        "gradients": storage_bytes(zero.gradients),
        "sent": sent.sent["reduce_scatter"] + sent.sent["all_gather"],
        "other": sent.sent["all_reduce"],
    }


def one_bucket(stage: int, dtype: torch.dtype = torch.bfloat16):
    master = torch.float32 if dtype == torch.bfloat16 else None
    return bytes_of_a_step(lambda *a: sharded(stage, *a, master=master, bucket_bytes=2**40), dtype)


@cache
def bytes_of_steps(ranks: int) -> list[list[dict[str, float]]]:
    return run_ranks(ranks, at_each_stage, one_bucket)


@pytest.mark.always("3")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bytes_held_equal_the_papers_formula_exactly(ranks):
    psi = padded(decoder(), ranks)
    want = {1: 4 * psi + 12 * psi // ranks, 2: 2 * psi + 14 * psi // ranks}
    for rank, stages in enumerate(bytes_of_steps(ranks)):
        for stage, got in zip(STAGES, stages, strict=True):
            assert got["alive"] == want[stage], f"stage {stage}, rank {rank}: {got}"
            assert got["weights"] == 2 * psi
            assert got["gradients"] == (2 * psi if stage == 1 else 2 * psi // ranks)
            assert got["states"] == 12 * psi // ranks


def test_in_plain_fp32_the_weights_are_their_own_master_and_k_is_8():
    psi = padded(decoder(), 3)
    for got in run_ranks(3, one_bucket, 2, torch.float32):
        assert got["states"] == 8 * psi // 3
        assert got["alive"] == 4 * psi + (4 + 8) * psi // 3


@pytest.mark.always("3")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bytes_sent_equal_two_times_the_weights_and_stage_2_repeats_the_half_for_each_micro_batch(ranks):
    each = 2 * padded(decoder(), ranks) * (ranks - 1) // ranks
    for stages in bytes_of_steps(ranks):
        for got, times in zip(stages, (2, 3), strict=True):  # two micro-batches
            assert got["sent"] == times * each
            assert got["other"] == 2 * (2 * 8) * (ranks - 1) / ranks  # the loss and its divisor, 8 bytes each


def peak_of_gradients(stage: int, no_sync: bool) -> int:
    """The most memory of two backwards over one token each, beyond what the sharded model holds."""
    torch.manual_seed(0)
    model = Decoder(vocab=64, hidden=128, heads=2, layers=6)
    zero = sharded(stage, model, torch.optim.AdamW(model.parameters()), dist.group.WORLD, bucket_bytes=2**18)
    token = torch.zeros(1, 1, dtype=torch.long)
    zero.zero_grad()
    peaks = []
    for _ in range(3):  # gloo's threads may give buffers back late
        zero.zero_grad()
        with peak_memory() as memory:
            for last in (False, True):
                if no_sync and not last:
                    with zero.no_sync():
                        mean_loss(model, token, token).backward()
                else:
                    with zero.micro_batch(last):
                        mean_loss(model, token, token).backward()
        peaks.append(memory.peak)
    return min(peaks)


@pytest.mark.prove
def test_stage_2_needs_two_buckets_and_one_gradient_and_with_no_sync_all_gradients():
    torch.manual_seed(0)
    model = Decoder(vocab=64, hidden=128, heads=2, layers=6)
    psi = 4 * sum(p.numel() for p in model.parameters())
    largest = max(4 * p.numel() for p in model.parameters())
    bucket = 2**18 + largest  # a bucket closes when it has reached its size
    activations = 200_000  # of one token, generously: a twentieth of the gradients
    assert activations < psi / 20
    for got in run_ranks(2, peak_of_gradients, 2, no_sync=False):
        assert got <= 2 * bucket + 2 * largest + activations
        assert got < psi / 2
    for got in run_ranks(2, peak_of_gradients, 2, no_sync=True):
        assert psi <= got <= psi + 2 * bucket + 2 * largest + activations
    for got in run_ranks(2, peak_of_gradients, 1, no_sync=True):  # stage 1 holds all gradients anyway
        assert got <= 2 * largest + activations


# ------------------------------------------------------------------------------------------------- mixed precision


def mixed_steps(make: Callable, micro_batches: int) -> dict[str, Tensor]:
    model, rank, ranks = decoder(dtype=torch.bfloat16), dist.get_rank(), dist.get_world_size()
    zero = make(model, torch.optim.AdamW(model.parameters(), lr=1e-2), dist.group.WORLD, master=torch.float32)
    for step in range(3):
        train_step(model, zero, make_batch(step, ranks, micro_batches)[rank])
        zero.step()
    return zero.full_weights()


def unsharded_mixed_steps(ranks: int) -> dict[str, Tensor]:
    """bf16 model and gradients, which add up in bf16 over the micro-batches; fp32 master weights and AdamW."""
    model = decoder(dtype=torch.bfloat16)
    masters = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    for step in range(3):
        batch = [part[0] for part in make_batch(step, ranks, 1)]
        valid = sum((y != IGNORE).sum() for _, y in batch)
        model.zero_grad()
        for x, y in batch:
            logits = model(x).flatten(0, 1).float()
            (F.cross_entropy(logits, y.flatten(), ignore_index=IGNORE, reduction="sum") / valid).backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad = p.grad.float()
        optimizer.step()
        for p, master in zip(model.parameters(), masters, strict=True):
            p.data.copy_(master)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def mixed_steps_at(stage: int) -> dict[str, Tensor]:
    return mixed_steps(partial(sharded, stage), 1)


def test_bf16_with_master_weights_is_bit_equal_to_the_unsharded_run_where_the_order_of_sums_is():
    want = unsharded_mixed_steps(2)
    for stages in run_ranks(2, at_each_stage, mixed_steps_at):
        for got in stages:
            for name in want:
                assert torch.equal(got[name], want[name]), name


# ---------------------------------------------------------------------------------------------------- order of events


def events_of_a_step(stage: int) -> list[tuple[str, object]]:
    model = decoder()
    zero = sharded(stage, model, sgd(model), dist.group.WORLD, bucket_bytes=8_000)
    train_step(model, zero, make_batch(0, dist.get_world_size(), 1)[dist.get_rank()])
    zero.step()
    events = zero.events
    zero.zero_grad()
    assert zero.events == [], "what happened since zero_grad()"
    return events


def test_reductions_leave_during_backward_and_each_gather_before_the_next_update():
    for events in (events for stages in run_ranks(2, at_each_stage, events_of_a_step) for events in stages):
        last_ready = max(i for i, (what, _) in enumerate(events) if what == "ready")
        early = [i for i, (what, _) in enumerate(events) if what == "reduce" and i < last_ready]
        buckets = sum(what == "update" for what, _ in events)
        assert buckets > 3 and len(early) >= buckets - 2
        for index in range(buckets - 1):
            assert events.index(("update", index)) < events.index(("gather", index))
            assert events.index(("gather", index)) < events.index(("update", index + 1))


def started_by_hand(make: Callable[..., Zero1]) -> tuple[list, dict[str, Tensor]]:
    model = decoder()
    zero = make(model, sgd(model), dist.group.WORLD, hooks=False)
    (batch,) = make_batch(0, dist.get_world_size(), 1)[dist.get_rank()]
    valid = valid_tokens([batch], dist.group.WORLD)
    zero.zero_grad()
    (token_loss_sum(model, *batch) / valid).backward()
    so_far = [event for event in zero.events if event[0] == "reduce"]
    for p in model.parameters():  # in an order of our own
        zero.start(p)
    zero.finish()
    return so_far, zero.full_gradients()


def assert_reduced_by_hand(results: list[tuple[list, dict[str, Tensor]]]) -> None:
    model = decoder()
    mean_loss(model, *whole_batch(0, 2, 1)).backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    for rank, (so_far, got) in enumerate(results):
        assert so_far == [], "reduced although hooks=False"
        assert_same_named(got, want, what="gradient of", rank=rank)


@pytest.mark.parametrize("stage", STAGES)
def test_without_hooks_gradients_are_reduced_when_start_is_called(stage):
    assert_reduced_by_hand(run_ranks(2, started_by_hand, partial(sharded, stage)))


# --------------------------------------------------------------------------------------------------------- bad input


def refused() -> list[tuple[str, str]]:
    """What is said to each optimizer, and the words that have to be in it."""
    model, other = decoder(), decoder()

    def mixed(**option: float) -> list[dict]:
        first, *others = model.parameters()
        return [{"params": [first]}, {"params": others, **option}]

    used = sgd(model)
    used.state[model.head.weight]["momentum_buffer"] = torch.zeros(1)
    without_a_norm = [p for p in model.parameters() if p is not model.norm.weight]
    cases = [
        (torch.optim.Adafactor(model.parameters()), "Adafactor cannot be sharded"),
        (torch.optim.Adagrad(model.parameters()), "Adagrad cannot be sharded"),
        (torch.optim.AdamW(model.parameters(), differentiable=True, foreach=False), "differentiable=True"),
        (torch.optim.AdamW(mixed(capturable=True)), "capturable=True"),  # in one group of two
        (torch.optim.SGD(without_a_norm, lr=1.0), "'norm.weight'"),
        (torch.optim.SGD([*model.parameters(), other.norm.weight], lr=1.0), "shape [23]"),
        (used, "has states already"),
        (torch.optim.SGD(mixed(momentum=0.9), lr=1.0), "SGD has groups with momentum and groups without"),
        (torch.optim.AdamW(mixed(amsgrad=True)), "AdamW has groups with amsgrad and groups without"),
        (torch.optim.RMSprop(mixed(centered=True)), "RMSprop has groups with centered and groups without"),
    ]
    said = [(error_from(ValueError, Zero1, model, optimizer, dist.group.WORLD), words) for optimizer, words in cases]
    assert all("weight" in message or "shape" in message for message, _ in said), said
    unfused = [torch.optim.AdamW(model.parameters(), amsgrad=True), torch.optim.AdamW(mixed(maximize=True))]
    for optimizer, words in (
        (sgd(model), "fused is an AdamW, the optimizer is SGD"),
        (unfused[0], "AdamW(amsgrad=True) is not in the fused kernel"),
        (unfused[1], "AdamW(maximize=True) is not in the fused kernel"),
    ):
        said.append((error_from(ValueError, Zero1, model, optimizer, dist.group.WORLD, fused=AdamWInOneGo()), words))
    frozen = nn.Linear(1, 1).requires_grad_(False)
    said.append((error_from(ValueError, Zero1, frozen, sgd(frozen), dist.group.WORLD), "no trainable parameter"))
    return said


def test_an_optimizer_that_cannot_be_sharded_is_refused_by_name():
    for message, words in run_ranks(1, refused)[0]:
        assert words in message, message


@pytest.mark.parametrize(
    ("arguments", "words"), [(["--stage", "4"], ["--stage", "4", "1, 2"]), (["--stge", "1"], ["--stge"])]
)
def test_a_wrong_option_is_one_line_that_names_it(arguments, words):
    said = refusal(main, arguments)
    assert all(word in said for word in words), said


@pytest.mark.parametrize("script", ["zero_stages", "zero3", "zero_hybrid", "zero_offload", "zero_state"])
def test_more_ranks_than_gpus_are_refused_before_any_process_group(script, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    said = refusal(importlib.import_module(script).main)
    assert said == "--nproc_per_node 4 is more than the GPUs here; use 2 or less"


def drop_an_owner(stage: int) -> bool:
    model = nn.Linear(3, 2)
    zero = sharded(stage, model, torch.optim.AdamW(model.parameters()), dist.group.WORLD)
    zero.zero_grad()
    with zero.micro_batch(last=True):
        model(torch.ones(1, 3)).sum().backward()
    zero.step()
    reference = weakref.ref(zero)
    del model, zero
    gc.collect()
    return reference() is None


def test_an_owner_that_is_no_longer_used_is_freed_with_its_shards_and_its_group():
    assert run_ranks(1, at_each_stage, drop_an_owner) == [[True, True]]


# ------------------------------------------------------------------------------------ what forgets itself is refused


def forgotten(stage: int, what: str) -> str:
    model = decoder()
    zero = sharded(stage, model, sgd(model), dist.group.WORLD, bucket_bytes=2**14)
    tokens, labels = make_batch(0, dist.get_world_size(), 1)[dist.get_rank()][0]
    zero.zero_grad()
    if what == "unsent":  # accumulated on this rank, and never sent
        with zero.no_sync():
            mean_loss(model, tokens, labels).backward()
    else:
        mean_loss(model, tokens, labels).backward()
    uses = (zero.step, lambda: zero.clip_grad_norm(1.0), lambda: list(zero.gradient_pieces()))
    said = [error_from(RuntimeError, use) for use in uses]
    zero.finish()
    zero.step()  # now it may
    model.norm.float()
    said.append(error_from(RuntimeError, zero.step))
    return "|".join(said)


@pytest.mark.parametrize("what", ["open", "unsent"])
def test_step_and_clipping_refuse_while_gradients_are_not_summed(what):
    for stages in run_ranks(2, at_each_stage, forgotten, what):
        for stage, said in zip(STAGES, stages, strict=True):
            assert said.count("call finish() after backward") == 3, said
            assert f"stage {stage}" in said
            assert "'norm.weight' was moved or cast" in said


# ------------------------------------------------------------------------------------------------ sums in fp32

MANY = 64  # micro-batches


def gradient_of_many(stage: int, wide: bool) -> tuple[dict[str, Tensor], dict[str, float]]:
    model = decoder(dtype=torch.bfloat16)
    options = dict(reduce_dtype=torch.float32, accumulate_dtype=torch.float32) if wide else {}
    kind = {1: Zero1, 2: Zero2}[stage]
    zero = kind(model, torch.optim.AdamW(model.parameters()), dist.group.WORLD, master=torch.float32, **options)
    with communication() as sent:
        train_step(model, zero, make_batch(0, dist.get_world_size(), MANY, length=8)[dist.get_rank()])
        gradients = zero.full_gradients()
        before = sent.sent["all_gather"]
        zero.step()
    held = held_bytes(model, zero)
    return gradients, {
        "gradients": storage_bytes(zero.gradients),
        "reduced": sent.sent["reduce_scatter"],
        "gathered": sent.sent["all_gather"] - before,
        "states": held.optimizer,
        "weights": held.parameters,
    }


def distance_from_float64(gradients: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    square = sum((gradients[name].double() - want[name]).square().sum() for name in want)
    return (square / sum(x.square().sum() for x in want.values())).sqrt().item()


def one_process_in_bf16(parts: list[tuple[Tensor, Tensor]]) -> tuple[dict[str, Tensor], float]:
    """Gradients in float64, and how far from them one process in bf16 is at best: summed without any rounding."""
    exact, dense = decoder(dtype=torch.bfloat16).double(), decoder(dtype=torch.bfloat16)
    valid = sum((y != IGNORE).sum() for _, y in parts)
    own = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in dense.named_parameters()}
    for x, y in parts:
        for model in (exact, dense):
            (token_loss_sum(model, x, y) / valid).backward()
        for name, p in dense.named_parameters():
            own[name] += p.grad
            p.grad = None
    want = {name: p.grad for name, p in exact.named_parameters()}
    return want, distance_from_float64(own, want)


@pytest.mark.prove
@pytest.mark.parametrize("stage", STAGES)
def test_sums_in_fp32_are_as_near_to_float64_as_one_process_and_sums_in_bf16_twice_as_far(stage):
    want, best = one_process_in_bf16([pair for part in make_batch(0, 2, MANY, length=8) for pair in part])
    wide, narrow = ([got for got, _ in run_ranks(2, gradient_of_many, stage, w)] for w in (True, False))
    for rank in range(2):
        error, rounded = distance_from_float64(wide[rank], want), distance_from_float64(narrow[rank], want)
        assert error <= 1.5 * best, f"rank {rank}: {error:.2e}, one process {best:.2e}"
        assert rounded > 2 * error, f"rank {rank}: in bf16 {rounded:.2e}, in fp32 {error:.2e}"


def gradient_of_many_held_back(stage: int, accumulate_dtype: torch.dtype | None) -> dict[str, Tensor]:
    model = decoder(dtype=torch.bfloat16)
    kind = {1: Zero1, 2: Zero2}[stage]
    zero = kind(model, torch.optim.AdamW(model.parameters()), dist.group.WORLD, accumulate_dtype=accumulate_dtype)
    batch = make_batch(0, 1, MANY, length=8)[0]
    zero.zero_grad()
    for i, (tokens, labels) in enumerate(batch):
        with zero.no_sync() if i + 1 < MANY else zero.micro_batch(last=True):
            token_loss_sum(model, tokens, labels).backward()
    return zero.full_gradients()


@pytest.mark.prove
@pytest.mark.parametrize("stage", STAGES)
def test_what_no_sync_holds_back_is_summed_in_fp32_at_stage_1_and_in_the_gradients_own_dtype_at_stage_2(stage):
    (wide,), (narrow,) = (run_ranks(1, gradient_of_many_held_back, stage, dtype) for dtype in (torch.float32, None))
    assert {x.dtype for x in wide.values()} == {torch.float32}
    same = all(torch.equal(wide[name], narrow[name].float()) for name in wide)
    assert same == (stage == 2), "the docstrings of Zero1 and Zero2 say which stage adds up where"


@pytest.mark.prove
@pytest.mark.parametrize("stage", STAGES)
def test_sums_in_fp32_keep_4_bytes_of_gradient_and_send_4(stage):
    psi = padded(decoder(), 3)
    for _, got in run_ranks(3, gradient_of_many, stage, True):
        assert got["gradients"] == (4 * psi if stage == 1 else 4 * psi // 3)
        assert got["gradients"] + got["states"] + got["weights"] == psi * bytes_per_parameter(stage, 3, gradient=4)
        reduced = bytes_sent(stage, 3, 4 * psi, micro_batches=MANY, weights=2 * psi)
        assert got["reduced"] + got["gathered"] == pytest.approx(reduced, abs=1e-6)


def in_wider_dtypes(stage: int, dtype: torch.dtype) -> list[Trace]:
    reduce, wide = {"reduce_dtype": torch.float64}, {"accumulate_dtype": torch.float64}
    build = partial(decoder, dtype=dtype)
    return [
        zero_trace(lambda *a, o=options: sharded(stage, *a, **o), dist.group.WORLD, build, micro_batches=3)
        for options in (reduce, wide, reduce | wide)
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("stage", STAGES)
def test_sums_in_float64_are_those_of_the_unsharded_model_whether_its_gradients_have_that_dtype_or_not(stage, dtype):
    got, want = run_ranks(2, in_wider_dtypes, stage, dtype), reference_trace(2, micro_batches=3)
    assert_same_traces(got, want, 1e-10 if dtype == torch.float64 else 1e-5)


def sums_beyond_fp32(stage: int, hooks: bool) -> float:
    """Rank 0 has the gradients 2²⁴, 1, 1 in fp32, rank 1 has 1, 1, 1: no sum of them in fp32 has the ones."""
    model, wide = nn.Linear(1, 1, bias=False), torch.float64
    zero = sharded(
        stage, model, sgd(model), dist.group.WORLD, hooks=hooks, accumulate_dtype=wide, reduce_dtype=wide
    )  # fmt: skip
    zero.zero_grad()
    for i, gradient in enumerate((2.0**24 if dist.get_rank() == 0 else 1.0, 1.0, 1.0)):
        with zero.micro_batch(last=i == 2):
            (gradient * model.weight).sum().backward()
    return zero.full_gradients()["weight"].item()


@pytest.mark.parametrize("hooks", [True, False])
def test_micro_batches_and_ranks_are_summed_in_the_wide_dtypes_with_hooks_and_without(hooks):
    assert run_ranks(2, at_each_stage, sums_beyond_fp32, hooks) == [[2.0**24 + 5] * 2] * 2
