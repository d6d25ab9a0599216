"""Attention in chunks against one reference: dense attention over the whole sequence, in one process."""

import inspect
import io
import math
import sys
from contextlib import nullcontext, redirect_stdout
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from _fpdt_demo import settled
from fpdt_attention import (
    EXPLICIT,
    FUSED,
    ChunkedAttention,
    Kernel,
    attend,
    check_sizes,
    demo,
    explicit_backward,
    explicit_forward,
    fpdt_attention,
    fpdt_positions,
    kernel_for,
    main,
    merge,
    to_heads,
    to_tokens,
)
from fpdt_costs import (
    Sizes,
    attention_peak,
    host_peak,
    link_bytes,
    network_bytes,
    record_forward,
)
from fpdt_store import CpuMachine, Race, Store, Watch
from harness.attention import attention_results, random_qkv
from harness.meter import communication, peak_memory
from harness.programs import error_from, refusal
from harness.ranks import run_ranks
from harness.reference import assert_same, error_between
from test_fpdt_store import Forgetful
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2] / "05_context_parallel" / "in_depth"))
import context_ring
import context_ulysses

S, D = 64, 4
NAMES = ("out", "dq", "dk", "dv")
CPU = torch.device("cpu")


def tensors(heads: tuple[int, int], B: int = 1, length: int = S, dtype=torch.float64) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    return [x.to(dtype) for x in random_qkv(heads, length, D, batch=B, seed=0)]


def gradients(attention, *given: Tensor) -> list[Tensor]:
    return attention_results(attention, *given, causal=True)


def written_out(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Attention once more, from its definition: every query a row of its own."""
    G, rows = q.shape[2] // k.shape[2], []
    k, v = k.repeat_interleave(G, 2), v.repeat_interleave(G, 2)
    for i in range(q.shape[1]):
        scores = torch.einsum("bnd,bsnd->bns", q[:, i], k[:, : i + 1]) / q.shape[-1] ** 0.5
        rows.append(torch.einsum("bns,bsnd->bnd", scores.softmax(-1), v[:, : i + 1]))
    return torch.stack(rows, 1)


@cache
def reference(heads: tuple[int, int], B: int) -> list[Tensor]:
    return gradients(written_out, *tensors(heads, B))


# ---------------------------------------------------------------------------------------------------- the one reference

# query and key/value heads, chunks, batch; of 16 chunks a rank of 4 has one token; 2 ranks copy each of 3 heads once
CASES = [*(((8, 8), u, 1) for u in (1, 2, 4)), ((8, 2), 4, 2), ((4, 1), 16, 1), ((12, 3), 2, 1)]


def all_cases() -> list[list[Tensor]]:
    group, found = dist.group.WORLD, []
    for heads, u, B in CASES:
        mine = fpdt_positions(S, group.rank(), group.size(), u)
        attention = fpdt_attention(group, u, Store(CpuMachine()))
        found.append(gradients(attention, *(x[:, mine] for x in tensors(heads, B))))
    return found


@pytest.mark.always("2")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_output_and_every_gradient_equal_dense_attention_for_any_chunks_ranks_and_heads(ranks):
    for rank, cases in enumerate(run_ranks(ranks, all_cases)):
        for (heads, u, B), got in zip(CASES, cases, strict=True):
            mine = fpdt_positions(S, rank, ranks, u)
            for name, x, want in zip(NAMES, got, reference(heads, B), strict=True):
                assert_same(x, want[:, mine], what=f"{name}, {heads} heads in {u} chunks", rank=rank)


def test_chunk_i_of_all_ranks_is_a_contiguous_piece_and_every_token_has_one_rank():
    assert fpdt_positions(16, 1, 2, 4).tolist() == [2, 3, 6, 7, 10, 11, 14, 15]
    for P, u in ((1, 4), (2, 4), (3, 2), (4, 1)):
        by_rank = torch.stack([fpdt_positions(48, r, P, u).view(u, -1) for r in range(P)])  # [P, u, s]
        for i in range(u):
            assert by_rank[:, i].flatten().tolist() == list(range(i * 48 // u, (i + 1) * 48 // u)), (P, u, i)


def alone(work, *args):
    """`work(group, *args)` on one rank."""
    [result] = run_ranks(1, work, *args)
    return result


# ------------------------------------------------------------------------------------------------------- the numbers


def test_two_partial_softmaxes_merge_without_overflow_whatever_the_size_of_the_scores():
    for scale in (1.0, 3e2):
        q, k, v, _ = tensors((2, 2), length=12)
        q = q * scale
        parts = [attend(EXPLICIT, q, k[:, a:b], v[:, a:b], causal=False) for a, b in ((0, 5), (5, 12))]
        (out, lse), (more, more_lse) = parts
        merge(out, lse, more, more_lse)
        want, want_lse = attend(EXPLICIT, q, k, v, causal=False)
        assert_same(out, want, what=f"out at scale {scale}")
        assert_same(lse, want_lse, what=f"lse at scale {scale}")


def test_the_fused_kernel_gives_what_the_explicit_one_does():
    q, k, v, dout = tensors((2, 2), length=8)
    for causal in (True, False):
        given = EXPLICIT.forward(q, k, v, causal=causal)
        want = (*given, *EXPLICIT.backward(dout, q, k, v, *given, causal=causal))
        got = FUSED.forward(q, k, v, causal=causal)
        got = (*got, *FUSED.backward(dout, q, k, v, *given, causal=causal))
        for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
            assert_same(x, y, what=name)
    assert explicit_forward(*(x.bfloat16() for x in (q, k, v)), causal=True)[1].dtype == torch.float32
    for on_gpu, dtype in product((False, True), (torch.float16, torch.bfloat16, torch.float32, torch.float64)):
        want = EXPLICIT if on_gpu and dtype in (torch.float32, torch.float64) else FUSED
        assert kernel_for(SimpleNamespace(is_cuda=on_gpu, dtype=dtype)) is want, (on_gpu, dtype)


def under_autocast() -> list[tuple[Tensor, Tensor]]:
    q, k, v, _ = tensors((4, 1), dtype=torch.float32)
    attention = fpdt_attention(dist.group.WORLD, 4, Store(CpuMachine()))
    with torch.autocast("cpu", torch.bfloat16):
        got = attention(q, k, v.bfloat16(), causal=True)
        exact = attention(q.double(), k.double(), v.double(), causal=True)
    want = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), causal=True)
    return [(got, want), (exact, attention(q.double(), k.double(), v.double(), causal=True))]


def test_autocast_casts_what_a_norm_has_widened_and_leaves_float64():
    assert all(torch.equal(got, want) and got.dtype == want.dtype for got, want in alone(under_autocast))


def low_precision() -> list[float]:
    """Errors of out, dq, dk, dv against float64: in one chunk, then in sixteen."""
    group, want = dist.group.WORLD, gradients(written_out, *tensors((4, 1)))
    errors = []
    for u in (1, 16):
        attention = fpdt_attention(group, u, Store(CpuMachine()), EXPLICIT)
        got = gradients(attention, *tensors((4, 1), dtype=torch.bfloat16))
        errors.append([error_between(g.double(), w) for g, w in zip(got, want, strict=True)])
    return errors


def test_in_bf16_sixteen_chunks_are_as_exact_as_one_because_sums_are_in_fp32():
    [[one, many]] = run_ranks(1, low_precision)
    for name, a, b in zip(NAMES, one, many, strict=True):
        assert b <= 1.5 * a, f"{name}: error {b:.1e} in 16 chunks, {a:.1e} in one"


def host_types() -> set[torch.dtype]:
    """Of all sums of dq that go home, in a model in bf16."""
    store, seen = Store(CpuMachine()), []
    plain = store.offload
    store.offload = lambda source, into=None: (seen.append((source, into)), plain(source, into))[1]  # type: ignore[method-assign]
    gradients(fpdt_attention(dist.group.WORLD, 4, store, EXPLICIT), *tensors((4, 1), dtype=torch.bfloat16))
    return {source.data.dtype for source, _ in seen if not isinstance(source, Tensor)}


def test_dq_goes_to_the_host_and_comes_back_in_fp32():
    assert run_ranks(1, host_types) == [{torch.float32}]


def undeclared() -> set[str]:
    with Watch(machine := CpuMachine()) as watch:
        gradients(fpdt_attention(dist.group.WORLD, 4, Store(machine), EXPLICIT), *tensors((4, 2)))
    assert machine.clock["compute"]["compute"] > 100, "no operator was seen"
    return watch.undeclared


def test_the_computation_says_of_every_slot_that_it_touches_it():
    """The race detector believes what `compute` is told. Here every operator is asked."""
    assert run_ranks(1, undeclared) == [set()]


def test_what_chapter_5_has_too_has_the_same_name_and_takes_the_same():
    for mine, theirs in (
        (to_heads, context_ulysses.to_heads),
        (to_tokens, context_ulysses.to_tokens),
        (merge, context_ring.merge),
        (explicit_forward, context_ring.explicit_forward),
        (explicit_backward, context_ring.explicit_backward),
    ):
        assert mine.__name__ == theirs.__name__
        assert inspect.signature(mine) == inspect.signature(theirs), mine.__name__
    for kernel in (FUSED, EXPLICIT):
        assert inspect.signature(kernel.forward) == inspect.signature(explicit_forward)
        assert inspect.signature(kernel.backward) == inspect.signature(explicit_backward)


def test_the_kernels_of_chapter_5_do_for_a_pair_of_chunks_what_those_of_here_do():
    """Not only the names: the order of dimensions, too. 5 keys and 3 queries would not fit in any other."""
    q, k, v, dout = random_qkv((2, 2), 3, D, kv_length=5)
    given = explicit_forward(q, k, v, causal=False)
    mine = (*given, *explicit_backward(dout, q, k, v, *given, causal=False))
    theirs = context_ring.explicit_forward(q, k, v, causal=False)
    theirs = (*theirs, *context_ring.explicit_backward(dout, q, k, v, *given, causal=False))
    for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), mine, theirs, strict=True):
        assert_same(got, want, what=name)


# ------------------------------------------------------------------------------------------------------ bytes, exactly


def measured(sizes: Sizes, slots: int) -> dict[str, int]:
    """Bytes of one forward and backward of this rank, and peaks of the device."""
    group, make = dist.group.WORLD, torch.Generator().manual_seed(0)
    T, e = sizes.S // sizes.P, {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[sizes.e]
    widths = (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)
    *qkv, dout = [torch.randn(1, T, n, sizes.head_dim, generator=make, dtype=e) for n in widths]
    grads, s = [torch.empty_like(x) for x in qkv], T // sizes.u
    store = Store(CpuMachine())
    core, out = ChunkedAttention(group, sizes.u, store, slots=slots), torch.empty_like(dout)

    def put(i: int, chunk: Tensor) -> None:
        out[:, i * s : (i + 1) * s] = chunk

    def put_grads(i: int, *chunks: Tensor) -> None:
        for grad, chunk in zip(grads, chunks, strict=True):
            grad[:, i * s : (i + 1) * s] = chunk

    with settled(), communication() as sent, peak_memory() as forward:
        kept = core.forward(lambda i: [x[:, i * s : (i + 1) * s] for x in qkv], put, CPU, keep=True)
    link = store.offloaded, store.fetched
    with settled(), communication() as sent_back:
        away = [store.offload(to_heads(chunk, group)) for chunk in dout.split(s, 1)]
        with peak_memory() as backward:
            core.backward(kept, away, put_grads, CPU)
    found = dict(forward=forward.peak, backward=backward.peak, network=sent.total, network_back=sent_back.total)
    found |= dict(out=link[0], back=link[1], out2=store.offloaded - link[0], back2=store.fetched - link[1])
    return found | dict(host=store.host_peak, left=store.host_bytes)


def measured_all(cases: list[tuple[Sizes, int]]) -> list[dict[str, int]]:
    return [measured(*case) for case in cases]


def sizes_for(P: int, u: int) -> list[tuple[Sizes, int]]:
    """And with how many slots: two, as usual, or one."""
    base = [Sizes(64, P, u, 8, 8, 4, 8), Sizes(128, P, u, 8, 2, 8, 4), Sizes(64, P, u, 16, 4, 2, 8)]
    base += [Sizes(64, P, u, 8, 2, 8, 2), Sizes(64, P, u, 8, 8, 4, 2)]  # in bf16
    return [(z, 2) for z in base] + [(base[0], 1), (base[1].with_chunks(1), 2)]


@pytest.mark.always("1-2", "2-4")
@pytest.mark.parametrize(("P", "u"), [(P, u) for P in (1, 2) for u in (1, 2, 4, 8)])
def test_bytes_on_the_device_the_host_the_link_and_the_network_equal_the_formulas(P, u):
    cases = sizes_for(P, u)
    by_rank = run_ranks(P, measured_all, cases, timeout=120)
    for n, (z, slots) in enumerate(cases):
        for rank, numbers in enumerate(cases[n] for cases in by_rank):
            assert (numbers["out"], numbers["back"]) == link_bytes(z, "forward, kept"), z
            assert (numbers["out2"], numbers["back2"]) == link_bytes(z, "backward"), z
            assert numbers["network"] == numbers["network_back"] == network_bytes(z), z
            assert (numbers["host"], numbers["left"]) == (host_peak(z), 0), f"{z}, rank {rank}"
            for way in ("forward", "backward"):
                assert numbers[way] == attention_peak(z, way, slots), f"{z}, {slots} slots: peak of {way}, rank {rank}"


def test_device_memory_falls_as_1_over_u_and_stays_when_sequence_and_chunks_double():
    z = Sizes(S=2**20, P=4, u=4, heads=32, kv_heads=8, head_dim=128)
    for way in ("forward", "backward"):
        peaks = [attention_peak(z.with_chunks(u), way) for u in (4, 8, 16, 32, 64)]
        assert all(a == 2 * b for a, b in pairwise(peaks))
        double = Sizes(S=2**21, P=4, u=8, heads=32, kv_heads=8, head_dim=128)
        assert attention_peak(double, way) == attention_peak(z, way)


def without_keeping(u: int) -> tuple[int, int, int]:
    z, store = Sizes(64, 1, u, 4, 2, 4, 8), Store(CpuMachine())
    q, k, v, _ = tensors((4, 2))
    s = S // u
    core = ChunkedAttention(dist.group.WORLD, u, store)
    kept = core.forward(lambda i: [x[:, i * s : (i + 1) * s] for x in (q, k, v)], lambda i, out: None, CPU, keep=False)
    assert (store.offloaded, store.fetched) == link_bytes(z, "forward")
    for buffer in kept.buffers():
        store.drop(buffer)
    return store.offloaded, len(kept.k), store.host_bytes


def test_what_no_later_chunk_asks_for_is_not_offloaded():
    assert alone(without_keeping, 1) == (0, 0, 0)
    assert alone(without_keeping, 4)[1] == 3


# ------------------------------------------------------------------------------------------------------ who waits whom


def operations(u: int) -> list:
    machine = CpuMachine(record=True)
    q, k, v, _ = tensors((4, 2))
    s, core = S // u, ChunkedAttention(dist.group.WORLD, u, Store(machine))
    core.forward(lambda i: [x[:, i * s : (i + 1) * s] for x in (q, k, v)], lambda i, out: None, CPU, False)
    return machine.ops


def test_the_recorded_schedule_is_the_one_whose_idle_time_is_known():
    for u in (1, 2, 4, 8):
        got, want = alone(operations, u), record_forward(u)
        assert [(o.stream, o.name, o.after) for o in got] == [(o.stream, o.name, o.after) for o in want], u
        assert sum(o.amount for o in got if o.name == "attend") == S * (S + 1) / 2, "pairs of a query and a key"


def race(who: str, whom: str, backward_only: bool, declared: bool) -> str:
    """`declared`: the computation says what it touches. Else what operators touch has to be enough."""
    store = Store(CpuMachine() if backward_only else Forgetful(who, whom))
    watch = nullcontext if declared else Watch
    if not declared:
        store.compute = lambda *what, **more: None  # type: ignore[method-assign]
    q, k, v, weight = tensors((4, 2))
    q.requires_grad_()
    try:
        with watch(store.machine):
            out = fpdt_attention(dist.group.WORLD, 4, store, EXPLICIT)(q, k, v, causal=True)
        if backward_only:
            forgetful = Forgetful(who, whom)
            forgetful.clock, store.machine = store.machine.clock, forgetful
        with watch(store.machine):
            out.backward(weight)
    except Race as found:
        return str(found)
    return "no race"


PASSES = pytest.mark.parametrize("backward_only", [False, True], ids=["forward", "backward"])


@PASSES
@pytest.mark.parametrize(("who", "whom"), [("compute", "fetch"), ("fetch", "compute"), ("nobody", "")])
def test_a_read_that_nobody_declares_is_a_race_if_it_does_not_wait(who, whom, backward_only):
    found = alone(race, who, whom, backward_only, False)
    assert (found == "no race") == (who == "nobody"), found
    assert who != "compute" or found.startswith("aten."), f"no operator was found out, but: {found}"


@PASSES
@pytest.mark.parametrize(
    ("who", "whom"), [("offload", "compute"), ("fetch", "offload"), ("compute", "fetch"), ("fetch", "compute")]
)
def test_a_missing_wait_is_a_race_in_the_real_loops_too(who, whom, backward_only):
    assert "without waiting" in alone(race, who, whom, backward_only, True)


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ((60, 2, 4, 8), "60 tokens do not divide into 4 chunks on 2 ranks; use a multiple of 8"),
        ((64, 2, 4, 7), "7 query heads do not divide among 2 ranks; use 1, 7 ranks"),
        ((8, 2, 9, 8), "9 chunks of a sequence of 8 tokens; use 1 to 4 chunks"),
        ((8, 2, 0, 8), "0 chunks of a sequence of 8 tokens; use 1 to 4 chunks"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_a_remedy(sizes, line):
    with pytest.raises(ValueError, match=line):
        check_sizes(*sizes)
    check_sizes(8, 1, 8, 8)  # as many chunks as tokens


def refusals() -> tuple[str, str, tuple[int, int], list[int]]:
    """Of attention without a causal mask, and of a second backward, whose buffers are others by then. Before them a
    validation and a forward that is thrown away; and what is in use on the host after these three."""
    store = Store(CpuMachine())
    q, k, v, weight = tensors((2, 2))
    v.requires_grad_()  # alone; elsewhere q
    attention = fpdt_attention(dist.group.WORLD, 4, store)
    with torch.no_grad():
        attention(q, k, v, causal=True)
    validation, held = (store.offloaded, store.fetched), [store.host_bytes]
    attention(q, k, v, causal=True)
    held.append(store.host_bytes)
    loss = (attention(q, k, v, causal=True) * weight).sum()
    loss.backward(retain_graph=True)
    full = error_from(ValueError, attention, q, k, v, causal=False)
    again = error_from(RuntimeError, loss.backward)
    told, k_alone = [], k.clone().requires_grad_()
    spies = (lambda *x, of=of, **how: told.append(of) or of(*x, **how) for of in (explicit_forward, explicit_backward))
    fpdt_attention(dist.group.WORLD, 2, store, Kernel(*spies))(q, k_alone, v.detach(), causal=True).sum().backward()
    assert told == [explicit_forward] * 3 + [explicit_backward] * 3, "another kernel than the one that is given"
    del loss
    return full, again, validation, [*held, store.host_bytes]


def test_attention_without_a_causal_mask_and_a_second_backward_are_refused():
    full, again, validation, held = alone(refusals)
    assert "causal" in full
    assert (again, held) == ("backward through this attention a second time; run forward again", [0, 0, 0])
    assert validation == link_bytes(Sizes(S, 1, 4, 2, 2, D, 8), "forward"), "a validation keeps nothing for backward"


def demos() -> list[list[str]]:
    """What the demo finds wrong: as it is, and beside a reference that is NaN."""
    args = SimpleNamespace(seq=32, chunks=2, heads=8, kv_heads=4)
    with redirect_stdout(io.StringIO()), pytest.MonkeyPatch.context() as patch:
        found = [demo(args, dist.group.WORLD, CPU)]
        patch.setitem(demo.__globals__, "dense_attention", lambda q, k, v, causal: q * (k + v).mean() * math.nan)
        return [*found, demo(args, dist.group.WORLD, CPU)]


def test_the_demo_says_of_nan_that_it_is_wrong_and_asks_for_room_for_all_ranks(monkeypatch):
    assert alone(demos) == [[], [f"{u} chunks, rank 0: error nan" for u in (1, 2)]]
    monkeypatch.setenv("HOST_MEMORY", "0.001")  # GiB: of two ranks each alone would fit
    assert "the chunks on the host need 1,310,720 bytes and 1,073,741 are free" in refusal(main, "", world_size=2)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--seq", "100", "--chunks", "8"], "--seq 100"),
        (["--chunks", "1024"], "--chunks 1024"),
        (["--seq", "4096", "--chunks", "4096"], "8,390,656 pairs"),
        (["--heads", "6"], "--kv-heads 4"),
        (["--seq", str(2**44)], "the chunks on the host need"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_2(arguments, named, monkeypatch):
    monkeypatch.setattr("fpdt_attention.run", lambda *_, **__: pytest.fail(f"{' '.join(arguments)} is let through"))
    assert named in refusal(main, arguments)


def test_heads_that_ranks_cannot_share_are_one_line_on_rank_0_only(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fpdt_attention.py"])
    monkeypatch.setenv("WORLD_SIZE", "16")
    for rank, lines in (("0", 1), ("3", 0)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as stop:
            main()
        err = capsys.readouterr().err
        assert stop.value.code == 2
        assert len(err.splitlines()) == lines
        assert not lines or "8 query heads do not divide among 16 ranks" in err
