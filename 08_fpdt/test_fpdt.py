"""FPDT on the ground floor against one process, against the depth, and against its own formulas."""

import contextlib
import gc
import sys
from functools import cache
from pathlib import Path

import fpdt as script
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.meter import communication, peak_memory
from harness.oracle import assert_same
from harness.ranks import run_ranks
from torch import Tensor, nn

sys.path.append(str(Path(__file__).with_name("in_depth")))
import fpdt_attention
from fpdt_store import Store, machine_for

S = 250  # ranks and chunks do not divide it: zeros have to fill up the last one
WAYS = [(1, 2), (4, 1), (4, 2), (5, 3)]  # chunks, slots
NAMES = ("out", "dx", "norm1.weight", "qkv.weight", "qkv.bias")


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Written out, with nothing of the script: [S, N, D], causal, each K/V head repeated for its query heads."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qnd,knd->nqk", q, k) * q.shape[-1] ** -0.5
    scores = scores + torch.full(scores.shape[-2:], -torch.inf, dtype=q.dtype).triu(1)
    return torch.einsum("nqk,knd->qnd", scores.softmax(-1), v)


@cache
def unsharded() -> list[Tensor]:
    """Three steps on one process, with torch's mean over tokens: losses and gradients, then weights."""
    torch.manual_seed(0)
    layers = (script.Layer() for _ in range(script.LAYERS))
    model = nn.ModuleList([nn.Embedding(script.V, script.H), *layers, nn.Linear(script.H, script.V)]).double()
    results = []
    for _ in range(3):
        tokens, turns = torch.randint(script.V, (S,)), torch.arange(script.H // 2)
        angle = torch.arange(S)[:, None].double() / 10000.0 ** (2 * turns.double() / script.H)
        x = model[0](tokens) + torch.cat((angle.sin(), angle.cos()), 1)
        for layer in model[1:-1]:
            x = x + layer.out(dense_attention(*layer.project(x)).flatten(1))
            x = x + layer.down(F.gelu(layer.up(x)))
        loss = F.cross_entropy(model[-1](x)[:-1], tokens[1:])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        results += [loss.detach(), *gradients]
        for p, g in zip(model.parameters(), gradients, strict=True):
            p.data -= 0.1 * g
    return results + [p.detach() for p in model.parameters()]


def trained(ways: list[tuple[int, int]], slices: bool = False, late: bool = False) -> list[list[Tensor]]:
    group = dist.group.WORLD
    if slices:
        group = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
    return [script.train(S, (Late if late else script.Host)("cpu", *way), group, "cpu") for way in ways]


def assert_trained(results: list, ways: list[tuple[int, int]]) -> None:
    for rank, versions in enumerate(results):
        for way, got in zip(ways, versions, strict=True):
            for at, (x, want) in enumerate(zip(got, unsharded(), strict=True)):
                what = f"(chunks, slots) = {way}: number {at} of losses, gradients and weights"
                assert_same(x, want, what=what, rank=rank)


@pytest.mark.always("1", "4")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_losses_every_gradient_and_weights_are_those_of_one_process(ranks):
    assert_trained(run_ranks(ranks, trained, WAYS), WAYS)


def test_two_slices_of_the_world_do_not_disturb_each_other():
    assert_trained(run_ranks(4, trained, [(4, 2)], slices=True), [(4, 2)])


# ------------------------------------------------------------------------------------------------------ order in time


class Late(script.Host):
    """Copies as late as the waits allow: each when somebody waits for it, or for a later one of its stream."""

    def __init__(self, *args):
        super().__init__(*args)
        self.streams, self.left = {}, {"fetch": [], "offload": []}

    def put(self, stream, name, after=(), to=None, source=None):
        number = super().put(stream, name, after)
        self.streams[number] = stream
        if to is not None:
            self.left[stream].append((number, after, to, source))
        for event in after if to is None else ():
            self.finish(event)
        return number

    def finish(self, event: int) -> None:
        left = self.left.get(self.streams.get(event, ""), [])
        while left and left[0][0] <= event:
            _, after, to, source = left.pop(0)
            for earlier in after:
                self.finish(earlier)
            to.data.copy_(source)  # no new version: autograd has saved it already


@pytest.mark.parametrize("ranks", [1, 2])
def test_copies_may_be_as_late_as_the_waits_allow(ranks):
    assert_trained(run_ranks(ranks, trained, [(4, 1), (4, 2)], late=True), [(4, 1), (4, 2)])


def alone(u: int, slots: int, dtype: torch.dtype = torch.float64, tokens: int = 0, grad: bool = True) -> tuple:
    """One layer's attention on this rank's tokens: (host, what it gives: out, dx and the gradients of its weights)."""
    group, host = dist.group.WORLD, script.Host("cpu", u, slots)
    layer, x, dout = inputs(tokens or 40 * u)
    mine = script.places_of(len(x), u, group.rank(), group.size())
    layer, x, dout = layer.to(dtype), x[mine].to(dtype).requires_grad_(grad), dout[mine].to(dtype)
    out = layer.attention(x, host, group)
    weights = (*layer.norm1.parameters(), *layer.qkv.parameters())
    return host, [out.detach(), *torch.autograd.grad(out, (x, *weights), dout)], mine


def inputs(tokens: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    layer = script.Layer()
    for p in layer.parameters():
        p.data = p.data.bfloat16().double() * 2
    return layer.double(), *(torch.randn(tokens, script.H).bfloat16().double() for _ in range(2))


def before(ops: list[tuple]) -> list[set[int]]:
    """Of each operation, numbered from 1, those that are certainly over when it starts."""
    found: list[set[int]] = [set()]
    last: dict[str, int] = {}
    for number, (stream, _, _, after) in enumerate(ops, 1):
        found.append(set().union(*({e} | found[e] for e in (*after, last.get(stream, 0)) if e)))
        last[stream] = number
    return found


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_fetch_waits_for_the_last_reader_of_its_slot_and_for_no_later_one(slots):
    ops = run_ranks(1, ops_of, 5, slots)[0]
    past, rows = before(ops), {}
    for number, (stream, name, _, _) in enumerate(ops, 1):
        if stream == "compute" and "." in name:
            rows.setdefault(name.split(".")[0], []).append(number)
    for user, pairs in rows.items():  # of a chunk of queries, forward; of keys and values, backward
        first = 1 if user[0] == "q" else 0  # a chunk's own keys need no fetch
        each = 1 if user[0] == "q" else 5
        end = max(pairs[-1], pairs[0])
        begin = ops_between(ops, user, pairs)
        fetches = [begin[i : i + each] for i in range(0, len(begin), each)]
        assert len(fetches) == len(pairs) - first, f"{user}: {len(fetches)} fetches for pairs {pairs}, up to {end}"
        for turn, numbers in enumerate(fetches):
            for number in numbers:
                if turn >= slots:
                    reader = pairs[first + turn - slots]
                    assert reader in past[number], f"{ops[number - 1]} does not wait for {ops[reader - 1]}"
                later = pairs[first + turn - slots + 1] if turn >= slots else pairs[0]
                assert later not in past[number], f"{ops[number - 1]} waits for {ops[later - 1]}: no overlap"
                assert number in past[pairs[first + turn]], f"{ops[pairs[first + turn] - 1]} does not wait for {number}"
                waits = [pair for pair in pairs[first : first + turn] if number in past[pair]]
                assert not waits, f"{ops[waits[0] - 1]} waits for {ops[number - 1]}, of a later item: no overlap"


def test_a_fetch_into_a_new_slot_waits_for_what_was_computed_before():
    """The slot is new. Its memory may be what an unfinished computation still reads."""
    ops, last = run_ranks(1, ops_of, 5, 2)[0], 0
    past = before(ops)
    for number, (stream, name, _, _) in enumerate(ops, 1):
        if stream == "compute":
            last = number
        elif stream == "fetch" and last:
            assert last in past[number], f"the fetch of {name} does not wait for {ops[last - 1][1]}"


def ops_between(ops: list[tuple], user: str, pairs: list[int]) -> list[int]:
    """The fetches for a row of pairs, in order: names follow from the row."""
    if user[0] == "q":
        names = [f"kv{j}" for j in range(int(user[1:]))]
        last = [n for n, op in enumerate(ops, 1) if op[0] == "fetch" and op[1] in names and n < pairs[-1]]
        return last[len(last) - len(names) :] if names else []
    j, u = int(user[2:]), 5
    names = [f"{kind}{i}" for i in range(u - 1, j - 1, -1) for kind in ("q", "out", "dout", "lse", "dq")]
    found = [n for n, op in enumerate(ops, 1) if op[0] == "fetch" and op[1] in names and n < pairs[-1]]
    return found[len(found) - len(names) :]


def ops_of(u: int, slots: int) -> list[tuple]:
    return alone(u, slots)[0].ops


def test_an_offload_waits_for_the_computation_and_a_fetch_for_the_offload():
    ops = run_ranks(1, ops_of, 4, 2)[0]
    past, last, stored = before(ops), 0, {}
    for number, (stream, name, _, _) in enumerate(ops, 1):
        if stream == "compute":
            last = number
        elif stream == "offload":
            assert last in past[number], f"the offload of {name} does not wait for {ops[last - 1][1]}"
            stored[name] = number
        else:
            assert stored[name] in past[number], f"the fetch of {name} does not wait until it is there"


# ---------------------------------------------------------------------------------------------------- attention alone


def both_floors(u: int) -> tuple:
    """This rank's out, dx and gradients of weights by the ground floor and by in_depth, and where its tokens are."""
    group = dist.group.WORLD
    _, ours, mine = alone(u, 2)
    layer, x, dout = inputs(40 * u)
    x = x[mine].requires_grad_()
    deep = fpdt_attention.fpdt_attention(group, u, Store(machine_for(torch.device("cpu"))))
    out = deep(*(y[None] for y in layer.project(x)), causal=True)[0].flatten(1)
    weights = (*layer.norm1.parameters(), *layer.qkv.parameters())
    assert torch.equal(mine, fpdt_attention.fpdt_positions(40 * u, group.rank(), group.size(), u))
    return ours, [out.detach(), *torch.autograd.grad(out, (x, *weights), dout[mine])], mine


def dense(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    layer, x, dout = inputs(tokens)
    layer, x, dout = layer.to(dtype), x.to(dtype).requires_grad_(), dout.to(dtype)
    plain = dtype != torch.float64  # torch's own, in this precision
    out = layer.attention(x, None, None) if plain else dense_attention(*layer.project(x)).flatten(1)
    return [out.detach(), *torch.autograd.grad(out, (x, *layer.norm1.parameters(), *layer.qkv.parameters()), dout)]


@pytest.mark.parametrize(("ranks", "u"), [(1, 4), (2, 4), (4, 2), (2, 1)])
def test_it_is_dense_attention_and_agrees_with_in_depth(ranks, u):
    want, found = dense(40 * u, torch.float64), run_ranks(ranks, both_floors, u)
    for rank, (ours, deep, mine) in enumerate(found):
        for name, x, y, whole in zip(NAMES, ours, deep, want, strict=True):
            if name in ("out", "dx"):
                assert_same(x, whole[mine], what=name, rank=rank)
            assert_same(x, y, what=f"{name}, against in_depth", rank=rank)
    for at, name in enumerate(NAMES[2:], 2):
        assert_same(sum(ours[at] for ours, _, _ in found), want[at], what=f"the sum over ranks of d {name}")


def test_bfloat16_errs_at_most_one_and_a_half_times_as_much_as_dense_attention_in_bfloat16():
    exact, plain = dense(320, torch.float64), dense(320, torch.bfloat16)
    found = run_ranks(2, low_precision, 8)
    for at, name in enumerate(NAMES):
        ours = torch.empty_like(exact[at])
        for got, mine in found:
            assert got[at].dtype == torch.bfloat16
            if at < 2:
                ours[mine] = got[at].double()
        if at >= 2:
            ours = sum(got[at].double() for got, _ in found)
        error, allowed = ((y.double() - exact[at]).norm().item() for y in (ours, plain[at]))
        assert error <= 1.5 * allowed, f"{name} is off by {error:.2e}, dense attention by {allowed:.2e}"


def sums() -> dict:
    """In a model in bf16: the types of what is summed over chunks, and of what waits on the host."""
    found, plain = {}, script.attend_backward

    class Seen(script.Host):
        def offload(self, stored, i, **tensors):
            found.update({name: x.dtype for name, x in tensors.items()})
            super().offload(stored, i, **tensors)

    def seen(dq, dkv, *rest):
        found.update({"dq": dq.dtype, "dkv": dkv.dtype})
        plain(dq, dkv, *rest)

    script.attend_backward = lambda dq, dkv, given, kv, causal: seen(dq, dkv, given, kv, causal)
    try:
        layer, x, dout = inputs(80)
        layer, x = layer.bfloat16(), x.bfloat16().requires_grad_()
        layer.attention(x, Seen("cpu", 4, 2), dist.group.WORLD).backward(dout.bfloat16())
    finally:
        script.attend_backward = plain
    return found


def test_sums_over_chunks_are_float32_and_everything_else_travels_in_the_precision_of_the_model():
    found = run_ranks(1, sums)[0]
    narrow = {name for name, dtype in found.items() if dtype == torch.bfloat16}
    wide = {name for name, dtype in found.items() if dtype == torch.float32}
    assert narrow == {"q", "kv", "out", "dout"} and wide == {"lse", "dq", "dkv"}, found


def low_precision(u: int) -> tuple:
    _, got, mine = alone(u, 2, torch.bfloat16, tokens=320)
    return got, mine


def test_online_softmax_is_softmax_whatever_comes_first():
    """Scores of 1000 overflow without a running maximum; it may rise or fall from chunk to chunk."""
    torch.manual_seed(2)
    q, kv = torch.randn(2, 6, 8).double(), torch.randn(2, 2, 4, 3, 8).double()
    for scale in (1.0, 1000.0):
        for order in ((0, 1, 2, 3), (3, 2, 1, 0)):
            chunks = [kv[:, :, i] * torch.tensor([scale * (1 + i), 1.0]).double().view(2, 1, 1, 1) for i in order]
            [(out, lse)] = run_ranks(1, script.attend, q, chunks)
            k, v = torch.cat(chunks, 2)
            scores = q @ k.mT / 8**0.5
            scores.unflatten(1, (2, 3))[..., :3].masked_fill_(torch.ones(3, 3, dtype=torch.bool).triu(1), -torch.inf)
            assert_same(out, scores.softmax(-1) @ v, what=f"out, scores of {scale}, chunks {order}")
            assert_same(lse, scores.logsumexp(-1, keepdim=True), what=f"log-sum-exp, scores of {scale}")


def peaks_of_attend() -> list[int]:
    """The most bytes that one pair takes, and three."""
    q, kv = torch.randn(2, 32, 8).double(), torch.randn(2, 2, 16, 8).double()
    peaks = []
    for pairs in (1, 3):
        with peak_memory() as memory:
            script.attend(q, [kv] * pairs)
        peaks.append(memory.peak)
    return peaks


def test_scores_of_one_pair_are_gone_before_those_of_the_next_are_made():
    one, three = run_ranks(1, peaks_of_attend)[0]
    scores = 2 * 32 * 16 * 8
    assert three - one < scores / 2, f"{scores} bytes of scores are still there while the next are made"


# ------------------------------------------------------------------------------------------------- Ulysses and places


def places_of_all(P, u):
    return [script.places_of(24, u, rank, P).view(u, -1) for rank in range(P)]


@pytest.mark.parametrize(("P", "u"), [(1, 1), (1, 3), (2, 3), (4, 2)])
def test_all_ranks_together_hold_a_chunk_of_tokens_in_a_row(P, u):
    [parts] = run_ranks(1, places_of_all, P, u)
    assert all(part.dtype == torch.int64 for part in parts), f"places are {parts[0].dtype}"
    assert torch.equal(torch.cat(parts, 1), torch.arange(24).view(u, -1)), parts


def swapped() -> list:
    """Numbers that say where they come from: 100 head + place, in q and k of 8 and 4 heads."""
    rank, s, group = dist.get_rank(), 3, dist.group.WORLD
    places = torch.arange(rank * s, (rank + 1) * s).double()
    q, k = (
        (100 * torch.arange(heads)[None] + places[:, None])[:, :, None].expand(-1, -1, 5).clone() for heads in (8, 4)
    )
    with communication() as sent:
        there = script.to_heads(q, k + 1000, group=group)
        back = script.to_tokens(there, group)
    n = 8 // group.size()
    assert torch.equal(back[:, :, :n].flatten(1, 2), q), f"rank {rank}: what comes back is not what was sent"
    assert torch.equal(back[:, :, n:].flatten(1, 2), k + 1000), f"rank {rank}: k comes back as something else"
    return [there[..., 0], sent.calls]


@pytest.mark.parametrize("P", [1, 2, 4])
def test_one_message_brings_all_tokens_in_order_and_one_brings_them_back(P):
    for rank, (there, calls) in enumerate(run_ranks(P, swapped)):
        places, n, m = torch.arange(3 * P).double(), 8 // P, 4 // P
        heads = [100 * h for h in range(rank * n, rank * n + n)]
        heads += [1000 + 100 * h for h in range(rank * m, rank * m + m)]
        want = torch.tensor(heads).double()[:, None] + places
        assert torch.equal(there, want), f"rank {rank} of {P}: {there.tolist()}, not {want.tolist()}"
        assert calls == {"all_to_all": 2}, f"rank {rank}: {dict(calls)}"


# ----------------------------------------------------------------------------------------------------- bytes, lifetimes


def costs(u: int, slots: int, dtype: torch.dtype) -> tuple:
    """Of one layer, by the house's meters: peak on the device, sent; by the script: host, moved."""
    group, host = dist.group.WORLD, script.Host("cpu", u, slots)
    layer, x, dout = inputs(96 * u)
    mine = script.places_of(len(x), u, group.rank(), group.size())
    layer, x, dout = layer.to(dtype), x[mine].to(dtype).requires_grad_(), dout[mine].to(dtype)
    script.count.clear()
    with peak_memory() as memory, communication() as sent:
        layer.attention(x, host, group).backward(dout)
    moved = {name: sum(op[2] for op in host.ops if op[0] == name) for name in ("offload", "fetch")}
    known = sum(y.nbytes for y in (x, *layer.norm1.parameters(), *layer.qkv.parameters()))
    return memory.peak + known, sent.total, dict(script.count), moved


@pytest.mark.always("1-dtype0", "2-dtype1", "4-dtype0")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("P", [1, 2, 4])
def test_bytes_on_the_device_and_the_host_over_the_link_and_the_network_are_those_of_the_formulas(P, dtype):
    """Of the two layers, one: its share of all formulas but the host's, which has one layer in backward."""
    for u, slots in ((1, 1), (2, 2), (4, 1), (4, 2), (4, 3)):
        want, device = script.predicted(96 * u, P, u, slots, dtype.itemsize)
        for rank, (peak, sent, count, moved) in enumerate(run_ranks(P, costs, u, slots, dtype)):
            where = f"{u} chunks, {slots} slots, rank {rank} of {P}"
            assert peak == device, f"{where}: {peak:,} bytes on the device, not {device:,}"
            assert sent == count["sent"] == want["sent"] // script.LAYERS, f"{where}: sent {sent:,}"
            assert moved == {x: want[x] // script.LAYERS for x in moved}, f"{where}: moved {moved}"
            assert count["offload"] == moved["offload"] and count["fetch"] == moved["fetch"], f"{where}: {count}"
            c, n, m = 96, script.N // P, script.N_KV // P
            a_chunk = (4 * n + 2 * m) * c * script.D + n * c  # q, out, dout, dq; k, v; log-sum-exps
            assert count["host"] == u * a_chunk * dtype.itemsize, f"{where}: {count['host']:,} bytes on the host"


def alive() -> int:
    gc.collect()
    return sum(storage.nbytes() for storage in script.on_host.values())


def lifetimes() -> dict:
    """Bytes on the host in and after validations, abandoned forwards, and backwards whose results are still there."""
    group, found = dist.group.WORLD, {"before": alive()}
    layer, x, dout = inputs(160)
    x.requires_grad_()
    host = script.Host("cpu", 4, 2)
    with torch.no_grad():
        outs = [layer.attention(x, host, group) for _ in range(10)]
    found["offloaded by a validation"] = {op[1] for op in host.ops if op[0] == "offload"}
    found["after ten validations"] = alive()
    outs = [layer.attention(x, host, group) for _ in range(10)]
    found["ten forwards, kept"] = alive()
    del outs
    found["ten forwards, thrown away"] = alive()
    outs = [layer.attention(x, host, group) for _ in range(3)]
    first = torch.autograd.grad(outs[0], x, dout, retain_graph=True)[0]
    again = torch.autograd.grad(outs[0], x, dout)[0]
    found["twice"] = torch.equal(first, again)
    try:
        torch.autograd.grad(outs[0], x, dout)
    except RuntimeError as error:
        found["third time"] = str(error)
    for out in outs[1:]:
        out.backward(dout)
    found["after backward, outputs kept"] = alive()
    return found


def test_nothing_stays_on_the_host_after_validations_abandoned_forwards_and_backwards():
    found = run_ranks(1, lifetimes)[0]
    assert found["before"] == found["after ten validations"] == found["ten forwards, thrown away"] == 0, found
    assert found["after backward, outputs kept"] == 0 < found["ten forwards, kept"], found
    assert found["offloaded by a validation"] == {f"kv{i}" for i in range(4)}, "q, out and lse are for backward"
    assert found["twice"] and "second time" in found["third time"], found


def longer() -> list:
    """Peaks with chunks of 96 tokens, more and more of them, without what x, dx, out and their like take."""
    return [costs(u, 2, torch.float64)[0] - 3 * 96 * u * script.H * 8 for u in (4, 8, 16)]


def test_a_sequence_four_times_as_long_in_chunks_of_the_same_size_takes_only_the_residual_stream_more():
    peaks = run_ranks(1, longer)[0]
    assert peaks[0] == peaks[1] == peaks[2], peaks


# ----------------------------------------------------------------------------------------------------- the script


def checked(spoil: str) -> list[str]:
    plain = script.attend, dist.all_to_all_single

    def spoiled(q, kvs):
        out, lse = plain[0](q, kvs)
        return out * torch.nan, lse

    def more(*args, **kwargs):
        script.count["sent"] += 8
        return plain[1](*args, **kwargs)

    script.attend = spoiled if spoil == "nan" else plain[0]
    script.dist.all_to_all_single = more if spoil == "bytes" else plain[1]
    try:
        return script.check(101, [(2, 2)], dist.group.WORLD, "cpu")
    finally:
        script.attend, script.dist.all_to_all_single = plain


def test_the_check_is_content_with_any_length_and_notices_nan_and_bytes():
    assert run_ranks(2, checked, "")[0] == []
    assert any("error nan" in line for line in run_ranks(2, checked, "nan")[0])
    assert any("sent" in line for line in run_ranks(2, checked, "bytes")[1])


@pytest.mark.parametrize(
    ("argv", "ranks"),
    [
        *((["--chunks", bad], 1) for bad in ("0", "-2", "26", "nan")),
        (["--chunks", ""], 2),
        (["--chunk", "2"], 1),
        (["--nproc_per_node"], 3),
    ],
)
def test_a_bad_option_is_one_line_that_names_it(argv, ranks, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fpdt.py", *(argv if argv != ["--nproc_per_node"] else [])])
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("a process group was started"))
    with pytest.raises(SystemExit) as end:
        script.main()
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == "" and said.err.count("\n") == 1 and argv[0] in said.err


def test_more_ranks_than_gpus_are_refused_and_do_not_fall_back_to_gloo(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    test_a_bad_option_is_one_line_that_names_it(["--nproc_per_node"], 4, monkeypatch, capsys)
    assert not dist.is_initialized()


def test_memory_that_python_frees_under_a_copy_is_not_given_away(monkeypatch):
    """No GPU is needed to see that the allocator is told which stream still reads a tensor that goes to the host."""
    told: list = []

    class Fake:
        nbytes = 8

        def __init__(self, is_cuda: bool) -> None:
            self.is_cuda = is_cuda

        def copy_(self, source: "Fake", non_blocking: bool) -> None:
            assert non_blocking, "the program would wait for the copy"
            told.append("copied")

        def record_stream(self, stream: str) -> None:
            told.append(stream)

    class Stream(str):
        def record_event(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    host = script.Host("cpu", 1, 2)
    host.cuda = {"offload": Stream("offload"), "fetch": Stream("fetch")}
    host.put("offload", "q0", [], Fake(is_cuda=False), Fake(is_cuda=True))
    assert told == ["copied", "offload"]
