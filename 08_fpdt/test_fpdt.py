"""The core file against one process, against in_depth, and against its own formulas."""

import contextlib
import gc
import io
import sys
from pathlib import Path
from unittest.mock import patch

import fpdt as script
import pytest
import torch
import torch.distributed as dist
from _fpdt_log import RecordingOffloader
from harness.meter import communication, peak_memory
from harness.programs import error_from, refusal
from harness.ranks import run_ranks
from harness.reference import assert_same
from torch import Tensor, nn

sys.path.append(str(Path(__file__).with_name("in_depth")))
import fpdt_attention
from fpdt_store import Store, machine_for

CPU = torch.device("cpu")
SEQ_LEN = 250  # neither ranks nor chunks divide it: padding fills the last chunk
WAYS = [(4, 2), (5, 3)]  # chunks, buffers
NAMES = ("out", "dx", "attn_norm", "q_proj", "k_proj", "v_proj")


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Written out, with nothing of the script: [S, N, D], causal, each K/V head repeated for its query heads."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qnd,knd->nqk", q, k) * q.shape[-1] ** -0.5
    scores = scores + torch.full(scores.shape[-2:], -torch.inf, dtype=q.dtype).triu(1)
    return torch.einsum("nqk,knd->qnd", scores.softmax(-1), v)


def errors(ways: list[tuple[int, int]], slices: bool = False, late: bool = False) -> list[float]:
    """The largest error of each way in three steps, next to the full sequence on one process with torch's attention."""
    group = dist.group.WORLD
    if slices:
        group = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
    found = []
    for num_chunks, num_buffers in ways:
        offloader = (Late if late else script.CountingOffloader)(CPU, num_buffers)
        comm = script.AllToAllComm(group)
        found.append(script.train_next_to_reference(num_chunks, SEQ_LEN, offloader, comm))
    return found


def assert_matches_reference(found: list[list[float]], ways: list[tuple[int, int]]) -> None:
    for rank, of_ways in enumerate(found):
        for way, error in zip(ways, of_ways, strict=True):
            assert error <= 1e-10, f"(chunks, buffers) = {way}, rank {rank}: error {error:.1e}"


@pytest.mark.always("2")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_losses_gradients_and_parameters_match_reference(ranks):
    assert_matches_reference(run_ranks(ranks, errors, WAYS), WAYS)


@pytest.mark.prove
def test_two_slices_of_the_world_match_reference():
    assert_matches_reference(run_ranks(4, errors, [(4, 2)], slices=True), [(4, 2)])


def test_the_reference_is_the_model_written_out():
    model = script.build_model(CPU)
    w, tokens = dict(model.named_parameters()), torch.randint(script.VOCAB, [60])

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}_proj.weight"].T

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * w[f"{name}_norm.weight"]

    x = w["0.weight"][tokens] + w["1.weight"][:60]
    for i in range(2, 2 + script.N_LAYERS):
        q, k, v = (linear(norm(x, f"{i}.attn"), f"{i}.{name}").unflatten(1, (-1, script.HEAD_DIM)) for name in "qkv")
        x = x + linear(dense_attention(q, k, v).flatten(1), f"{i}.o")
        up = linear(norm(x, f"{i}.mlp"), f"{i}.up")
        x = x + linear(up * torch.special.ndtr(up), f"{i}.down")
    log_probs = (x @ w[f"{2 + script.N_LAYERS}.weight"].T).log_softmax(-1)
    expected = -log_probs[:-1].gather(1, tokens[1:, None]).mean()
    assert_same(script.reference_loss(model, tokens), expected, what="the loss")
    longest = max(-(-script.SEQ_LEN // (u * cp)) * u * cp for u in range(1, 26) for cp in (1, 2, 4))
    assert model[1].num_embeddings >= longest, "padding needs positions, too"


# ------------------------------------------------------------------------------------------------------ order in time


class Late(RecordingOffloader):
    """Copies as late as the waits allow: each when something waits for it, or for a later one of its stream."""

    def __init__(self, *args):
        super().__init__(*args)
        self.stream_of, self.left = {}, {"h2d": [], "d2h": []}

    def start_copy(self, stream, dst, src, wait_for, name):
        self.write_down(stream, name, src.nbytes)
        for event in wait_for:
            event.wait()
        self.stream_of[len(self.log)] = stream
        self.left[stream].append((len(self.log), dst, src, self.log[-1][3]))
        return self.record_event(stream)

    def wait_event(self, event, reader, name):
        super().wait_event(event, reader, name)
        for op in self.log[-1][3]:
            self.finish(op)

    def finish(self, op: int) -> None:
        left = self.left.get(self.stream_of.get(op, ""), [])
        while left and left[0][0] <= op:
            _, dst, src, wait_for = left.pop(0)
            for earlier in wait_for:
                self.finish(earlier)
            dst.data.copy_(src)  # no new version: autograd has saved it already


@pytest.mark.always("2")
@pytest.mark.parametrize("ranks", [1, 2])
def test_copies_may_be_as_late_as_the_waits_allow(ranks):
    ways = [(4, 1), (2, 2)]  # the last one: the backward pass begins with a chunk that was only copied away
    assert_matches_reference(run_ranks(ranks, errors, ways, late=True), ways)


def happened_before(log: list[tuple]) -> list[set[int]]:
    """For each operation, numbered from 1, those that are certainly over when it starts."""
    found: list[set[int]] = [set()]
    last: dict[str, int] = {}
    for number, (stream, _, _, wait_for) in enumerate(log, 1):
        found.append(set().union(*({e} | found[e] for e in (*wait_for, last.get(stream, 0)) if e)))
        last[stream] = number
    return found


def log_of_reads(num_buffers: int, reader_streams: tuple) -> list[tuple]:
    """Six items of two tensors are read; the first tensor is copied back to the host, as dq is."""
    offloader, host_tensors = RecordingOffloader(CPU, num_buffers), {}
    for name in ("a", "b"):
        for i in range(6):
            offloader.offload(host_tensors, f"{name}{i}", torch.full((2,), float(i)))
    offloader.write_down("compute", "earlier", 0)
    items = [[f"a{i}", f"b{i}"] for i in range(6)]
    for i, item in enumerate(offloader.prefetch_iter(host_tensors, items, "reader", reader_streams)):
        assert all(x.eq(i).all() for x in item), f"item {i} is {item}"
        if "d2h" in reader_streams:
            offloader.offload(host_tensors, f"back{i}", item[0])
    return offloader.log


@pytest.mark.parametrize("reader_streams", [("compute",), ("compute", "d2h")])
@pytest.mark.parametrize("num_buffers", [1, 2, 3])
def test_a_copy_waits_for_the_readers_of_its_buffer_and_for_no_later_one(num_buffers, reader_streams):
    [log] = run_ranks(1, log_of_reads, num_buffers, reader_streams)
    past, number = happened_before(log), {}
    for op, (stream, name, *_) in enumerate(log, 1):
        number[stream, name] = op
    last = number["compute", "earlier"]
    for i in range(6):
        read = number["compute", f"reader.a{i}"]
        for name in (f"a{i}", f"b{i}"):
            copy = number["h2d", name]
            assert copy in past[read], f"the computation does not wait for the copy of {name}"
            assert number["d2h", name] in past[copy], f"the copy of {name} does not wait until it is on the host"
            freed = i - num_buffers
            if freed >= 0:
                assert number["compute", f"reader.a{freed}"] in past[copy], f"{name} overwrites item {freed}"
            if freed >= 0 and "d2h" in reader_streams:
                assert number["d2h", f"back{freed}"] in past[copy], f"{name} overwrites item {freed} during its copy"
            later = number["compute", f"reader.a{max(freed, -1) + 1}"]
            assert later not in past[copy], f"the copy of {name} waits for a later item: no overlap"
            if i + 1 < 6:
                assert number["h2d", f"a{i + 1}"] not in past[read], f"item {i} waits for item {i + 1}: no overlap"
    early = [op[1] for op, before in zip(log, past[1:], strict=True) if op[0] == "h2d" and last not in before]
    assert not early, f"{early} are copied into memory that an earlier computation may still read"


def log_of_attention() -> list[tuple]:
    return attend(4, 2)[0].log


def test_an_offload_waits_for_the_computation():
    alone = RecordingOffloader(CPU)
    alone.write_down("compute", "the first", 0)
    alone.write_down("h2d", "the second", 0)
    assert alone.record_event("compute").last_op == 1, "an event is of its own stream"
    [log] = run_ranks(1, log_of_attention)
    past, last = happened_before(log), 0
    assert [op[1] for op in log if op[0] == "compute"][:4] == ["q0", "q1", "q1.kv0", "q2"]
    for number, (stream, name, *_) in enumerate(log, 1):
        if stream == "compute":
            last = number
        elif stream == "d2h":
            assert last in past[number], f"the copy of {name} to the host does not wait for {log[last - 1][1]}"


# ---------------------------------------------------------------------------------------------------- attention alone


def inputs(tokens: int, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor]:
    """A block, x and dout, whose values bf16 can represent."""
    torch.manual_seed(1)
    block = script.Block()
    for p in block.parameters():
        p.data = p.data.bfloat16() * 2
    x, dout = (torch.randn(tokens, script.HIDDEN).bfloat16().to(dtype) for _ in range(2))
    return block.to(dtype), x, dout


def run_attention(block, x: Tensor, num_chunks: int, offloader, comm=None) -> Tensor:
    comm = comm or script.AllToAllComm(dist.group.WORLD)
    return script.fpdt_attention(x, block.project_qkv, block.qkv_params(), num_chunks, offloader, comm)


def attend(num_chunks: int, num_buffers: int) -> tuple:
    """One block's attention to this rank's tokens: offloader, [out, dx, gradients of parameters], positions."""
    comm, offloader = script.AllToAllComm(dist.group.WORLD), RecordingOffloader(CPU, num_buffers)
    block, x, dout = inputs(40 * num_chunks)
    positions = script.token_positions(len(x), num_chunks, comm.rank, comm.cp)
    x = x[positions].requires_grad_()
    out = run_attention(block, x, num_chunks, offloader, comm)
    return offloader, gradients_of(out, x, block, dout[positions]), positions


def gradients_of(out: Tensor, x: Tensor, block, dout: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, (x, *block.qkv_params()), dout)]


def core_and_in_depth(num_chunks: int) -> tuple:
    group = dist.group.WORLD
    _, ours, positions = attend(num_chunks, 2)
    assert len({x.untyped_storage().data_ptr() for x in ours}) == len(ours), "two gradients share memory"
    block, x, dout = inputs(40 * num_chunks)
    out = run_attention(block, x[positions], num_chunks, script.CountingOffloader(CPU, 2))  # behind frozen layers
    frozen = torch.autograd.grad(out, block.qkv_params(), dout[positions])
    assert all(map(torch.equal, frozen, ours[2:])), "without a gradient of x the parameters have others"
    x = x[positions].requires_grad_()
    deep = fpdt_attention.fpdt_attention(group, num_chunks, Store(machine_for(CPU)))
    out = deep(*(y[None] for y in block.project_qkv(x)), causal=True)[0].flatten(1)
    expected = fpdt_attention.fpdt_positions(40 * num_chunks, group.rank(), group.size(), num_chunks)
    assert torch.equal(positions, expected)
    return ours, gradients_of(out, x, block, dout[positions]), positions


def dense(tokens: int) -> list[Tensor]:
    block, x, dout = inputs(tokens)
    x.requires_grad_()
    return gradients_of(dense_attention(*block.project_qkv(x)).flatten(1), x, block, dout)


@pytest.mark.parametrize(("ranks", "num_chunks"), [(1, 4), (2, 4), (4, 2), (2, 1)])
def test_attention_matches_dense_attention_and_in_depth(ranks, num_chunks):
    expected, found = dense(40 * num_chunks), run_ranks(ranks, core_and_in_depth, num_chunks)
    for rank, (ours, deep, positions) in enumerate(found):
        for name, x, y, full in zip(NAMES, ours, deep, expected, strict=True):
            if name in ("out", "dx"):
                assert_same(x, full[positions], what=name, rank=rank)
            assert_same(x, y, what=f"{name}, against in_depth", rank=rank)
    for index, name in enumerate(NAMES[2:], 2):
        assert_same(sum(ours[index] for ours, *_ in found), expected[index], what=f"the sum over ranks of d {name}")


def dtypes_of_sums() -> dict:
    """In a bf16 model: dtypes of what is summed over chunks and of what is copied to the host."""
    found, plain, add = {}, script.chunk_attention_backward, Tensor.__iadd__

    def added(total, x):
        if found.get("sums of gradients") != torch.bfloat16:
            found["sums of gradients"] = total.dtype
        return add(total, x)

    class Seen(RecordingOffloader):
        def offload(self, host_tensors, name, x):
            found[name.rstrip("0123456789")] = x.dtype
            super().offload(host_tensors, name, x)

    def seen(dq, dkv, *args, **kwargs):
        found.update({"dq": dq.dtype, "dkv": dkv.dtype})
        plain(dq, dkv, *args, **kwargs)

    with patch.object(script, "chunk_attention_backward", seen), patch.object(Tensor, "__iadd__", added):
        block, x, dout = inputs(80, torch.bfloat16)
        run_attention(block, x.requires_grad_(), 4, Seen(CPU, 2)).backward(dout)
    return found


def test_sums_over_chunks_are_float32_and_all_else_is_copied_in_the_dtype_of_the_model():
    found = run_ranks(1, dtypes_of_sums)[0]
    narrow = {name for name, dtype in found.items() if dtype == torch.bfloat16}
    wide = {name for name, dtype in found.items() if dtype == torch.float32}
    assert narrow == {"q", "kv", "out", "dout"}, f"{found}"
    assert wide == {"lse", "dq", "dkv", "sums of gradients"}, f"{found}"
    assert script.to_fp32(torch.ones(1, dtype=torch.float16)).dtype == torch.float32


def attention_with_gradient(q: Tensor, chunks: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    q.requires_grad_()
    out, lse = script.chunk_attention(q, chunks)
    (dq,) = torch.autograd.grad(out.square().sum() + lse.sum(), q)
    return out.detach(), lse.detach(), dq


def test_online_softmax_matches_softmax_in_any_order():
    """Scores of 1000 overflow without a running maximum; it may rise or fall from chunk to chunk."""
    torch.manual_seed(2)
    q, kv = torch.randn(2, 6, 8).double(), torch.randn(2, 2, 4, 3, 8).double()
    for scale in (1.0, 1000.0):
        for order in ((0, 1, 2, 3), (3, 2, 1, 0)):
            chunks = [kv[:, :, i] * torch.tensor([scale * (1 + i), 1.0]).double().view(2, 1, 1, 1) for i in order]
            [(out, lse, dq)] = run_ranks(1, attention_with_gradient, q, chunks)
            k, v = torch.cat(chunks, 2)
            x = q.detach().requires_grad_()
            scores = x @ k.mT / 8**0.5
            scores.unflatten(1, (2, 3))[..., :3].masked_fill_(torch.ones(3, 3, dtype=torch.bool).triu(1), -torch.inf)
            expected, expected_lse = scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)
            (expected_dq,) = torch.autograd.grad(expected.square().sum() + expected_lse.sum(), x)
            assert_same(out, expected.detach(), what=f"out, scores of {scale}, chunks {order}")
            assert_same(lse, expected_lse.detach(), what=f"log-sum-exp, scores of {scale}")
            assert_same(dq, expected_dq, what=f"dq by autograd, scores of {scale}")


def peaks_of_one_and_three_pairs() -> list[int]:
    q, kv = torch.randn(2, 128, 8).double(), torch.randn(2, 2, 64, 8).double()
    peaks = []
    for pairs in (1, 3):
        with peak_memory() as memory:
            script.chunk_attention(q, [kv] * pairs)
        peaks.append(memory.peak)
    return peaks


def test_scores_of_one_pair_are_freed_before_those_of_the_next_are_allocated():
    one, three = run_ranks(1, peaks_of_one_and_three_pairs)[0]
    scores = 2 * 128 * 64 * 8
    assert one < 1.75 * scores, "the probabilities do not take the place of the scores"
    assert three - one < scores / 2, f"{scores} bytes of scores are still allocated while the next are computed"


# ---------------------------------------------------------------------------------------------- Ulysses and positions


def positions_of_all(cp: int, num_chunks: int) -> list[Tensor]:
    return [script.token_positions(24, num_chunks, rank, cp).view(num_chunks, -1) for rank in range(cp)]


@pytest.mark.parametrize(("cp", "num_chunks"), [(1, 1), (1, 3), (2, 3), (4, 2)])
def test_all_ranks_together_store_a_chunk_of_tokens_in_order(cp, num_chunks):
    [parts] = run_ranks(1, positions_of_all, cp, num_chunks)
    assert all(part.dtype == torch.int64 for part in parts), f"positions are {parts[0].dtype}"
    stored = f"rank 0 of {cp} stores {parts[0].tolist()}, a row for each chunk"
    assert torch.equal(torch.cat(parts, 1), torch.arange(24).view(num_chunks, -1)), stored


def sent_and_returned() -> list:
    """Values that say where they come from, 100 head + position, in q, k and v of 8, 4 and 4 heads."""
    s, comm = 3, script.AllToAllComm(dist.group.WORLD)
    positions = torch.arange(comm.rank * s, (comm.rank + 1) * s).double()
    tensors = []
    for start, heads in ((0, 8), (1000, 4), (2000, 4)):
        values = start + 100 * torch.arange(heads) + positions[:, None]
        tensors.append(values[:, :, None].expand(-1, -1, 5).clone())
    with communication() as sent:
        on_heads = script.seq_to_heads(tensors, comm)
        returned = script.heads_to_seq(on_heads, comm)
    for name, x, y in zip("qkv", tensors, returned, strict=True):
        assert torch.equal(x, y), f"rank {comm.rank}: {name} does not return as it was sent"
    return [[x[..., 0] for x in on_heads], sent.calls]


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_one_message_brings_all_tokens_in_order_and_one_returns_them(cp):
    for rank, (on_heads, calls) in enumerate(run_ranks(cp, sent_and_returned)):
        for x, start, heads in zip(on_heads, (0, 1000, 2000), (8 // cp, 4 // cp, 4 // cp), strict=True):
            expected = start + 100 * torch.arange(rank * heads, (rank + 1) * heads)[:, None] + torch.arange(3 * cp)
            assert torch.equal(x, expected.double()), f"rank {rank} of {cp}: {x.tolist()}, not {expected.tolist()}"
        assert calls == {"all_to_all": 2}, f"rank {rank}: {dict(calls)}"


# ----------------------------------------------------------------------------------------------------- bytes, lifetimes


def expected_peak(c: int, cp: int, num_chunks: int, num_buffers: int, b: int) -> int:
    """The most bytes on the device during one layer's attention, if scores dominate (c >= 10 D).

    That is in the backward pass: x, dx, dout; parameters of norm and projections and their gradients; buffers; dkv;
    scores, their gradient, and a partial dq of a pair of chunks.
    """
    n, m, D, H = script.N_HEADS // cp, script.N_KV_HEADS // cp, script.HEAD_DIM, script.HIDDEN
    Q, K, L = c * n * D * b, 2 * c * m * D * b, c * n * b
    params = (H + H * (script.N_HEADS + 2 * script.N_KV_HEADS) * D) * b
    buffers = min(num_buffers, num_chunks) * (K + 4 * Q + L)
    return 3 * num_chunks * c // cp * H * b + 2 * params + buffers + K + 2 * c * c * n * b + Q + L


BYTES_OF = ((1, 1), (2, 2), (4, 1), (4, 2), (4, 3))  # chunks, buffers


def bytes_of(dtype: torch.dtype) -> list[tuple]:
    """Of one layer: peak on the device and bytes sent by the harness's meters; the others by the script."""
    found = []
    for num_chunks, num_buffers in BYTES_OF:
        comm, offloader = script.AllToAllComm(dist.group.WORLD), RecordingOffloader(CPU, num_buffers)
        block, x, dout = inputs(96 * num_chunks, dtype)
        positions = script.token_positions(len(x), num_chunks, comm.rank, comm.cp)
        x, dout = x[positions].requires_grad_(), dout[positions]
        with peak_memory() as memory, communication() as sent:
            run_attention(block, x, num_chunks, offloader, comm).backward(dout)
        known = sum(y.nbytes for y in (x, *block.qkv_params()))
        copied = [offloader.bytes_copied[stream] for stream in ("d2h", "h2d")]
        found.append((memory.peak + known, sent.total, comm.bytes_sent, copied, offloader.max_host_bytes))
    return found


@pytest.mark.always("2-dtype0")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_bytes_on_the_device_on_the_host_copied_and_sent_match_the_formulas(cp, dtype):
    """Of one layer, whose part of all formulas is 1/N_LAYERS, except for what the backward pass stores on the host."""
    of_ranks = run_ranks(cp, bytes_of, dtype)
    for way, (num_chunks, num_buffers) in enumerate(BYTES_OF):
        b = dtype.itemsize
        expected = script.expected_bytes(96 * num_chunks, cp, num_chunks, b)
        layer = {what: size // script.N_LAYERS for what, size in expected.items()}
        device = expected_peak(96, cp, num_chunks, num_buffers, b)
        for rank, found in enumerate(of_ranks):
            peak, sent, sent_by_script, copied, host = found[way]
            where = f"{num_chunks} chunks, {num_buffers} buffers, rank {rank} of {cp}"
            assert peak == device, f"{where}: {peak:,} bytes on the device, not {device:,}"
            assert sent == sent_by_script == layer["sent"], f"{where}: sent {sent:,}"
            assert copied == [layer["copied to the host"], layer["copied to the device"]], f"{where}: copied {copied}"
            n, m, D = script.N_HEADS // cp, script.N_KV_HEADS // cp, script.HEAD_DIM
            a_chunk = 96 * ((4 * n + 2 * m) * D + n) * b  # q, out, dout, dq; k, v; log-sum-exp
            assert host == num_chunks * a_chunk, f"{where}: {host:,} bytes on the host"
        Q = 96 * n * D * b  # dout and dq are of one layer, all else of each
        assert expected["stored on the host"] == num_chunks * (script.N_LAYERS * (a_chunk - 2 * Q) + 2 * Q)
        shorter = (96 - cp) * num_chunks + 1  # the least that is padded to so many tokens
        assert script.expected_bytes(shorter, cp, num_chunks, b) == expected, f"{num_chunks} chunks on {cp} ranks"


def rows_at_a_time() -> list[list[int]]:
    """In a step with 60 tokens in four chunks: the rows of each call of a feed-forward layer, and of the loss."""
    model, shard = script.build_model(CPU), script.shard_sequence(torch.arange(60), 4, 0, 1)
    comm, F = script.AllToAllComm(dist.group.WORLD), script.F
    with patch.object(F, "gelu", wraps=F.gelu) as gelu, patch.object(F, "cross_entropy", wraps=F.cross_entropy) as loss:
        script.forward_backward(model, shard, 4, script.HostOffloader(CPU), comm)
    return [[len(call.args[0]) for call in seen.call_args_list] for seen in (gelu, loss)]


def test_feed_forward_and_loss_run_chunk_by_chunk_and_again_in_the_backward_pass():
    assert run_ranks(1, rows_at_a_time) == [[2 * 4 * script.N_LAYERS * [15], 2 * 4 * [15]]]


def lifetimes() -> dict:
    """Bytes on the host after validations, abandoned forward passes, and backward passes whose outputs are alive."""
    block, x, dout = inputs(160)
    x.requires_grad_()
    offloader = RecordingOffloader(CPU, 2)

    def forward_passes(number: int) -> list[Tensor]:
        return [run_attention(block, x, 4, offloader) for _ in range(number)]

    def host_bytes() -> int:
        gc.collect()
        return offloader.host_bytes()

    found = {}
    with torch.no_grad():
        outs = forward_passes(10)
    found["copied by a validation"] = {op[1] for op in offloader.log if op[0] == "d2h"}
    found["after ten validations"] = host_bytes()
    outs = forward_passes(10)
    found["ten forward passes, kept"] = host_bytes()
    del outs
    found["ten forward passes, dropped"] = host_bytes()
    outs = forward_passes(3)
    first = torch.autograd.grad(outs[0], x, dout, retain_graph=True)[0]
    copy = first.clone()
    again = torch.autograd.grad(outs[0], x, dout)[0]
    found["twice"] = torch.equal(first, again) and torch.equal(first, copy)
    found["third time"] = error_from(RuntimeError, torch.autograd.grad, outs[0], x, dout)
    for out in outs[1:]:
        out.backward(dout)
    found["after backward, outputs kept"] = host_bytes()
    return found


def test_nothing_stays_on_the_host_after_validations_abandoned_forward_and_backward_passes():
    found = run_ranks(1, lifetimes)[0]
    assert found["after ten validations"] == found["ten forward passes, dropped"] == 0, found
    assert found["after backward, outputs kept"] == 0 < found["ten forward passes, kept"], found
    assert found["copied by a validation"] == {f"kv{i}" for i in range(4)}, "q, out and lse are for backward"
    assert found["twice"] and "second time" in found["third time"], found


# ----------------------------------------------------------------------------------------------------- the script


def check(broken: str) -> tuple[bool, str]:
    """Whether it passes, and what this rank prints."""
    attention, formula = script.chunk_attention, script.expected_bytes
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        if broken == "nan":
            patch.setattr(script, "chunk_attention", lambda *args: [x * torch.nan for x in attention(*args)])
        if broken == "bytes" and dist.get_rank() == 1:
            patch.setattr(script, "expected_bytes", lambda *args: formula(*args) | {"sent": 0})
        if broken == "gradient":
            patch.setattr(script, "chunk_attention_backward", lambda *args, **options: None)
        return script.check(2, 2, 21, dist.group.WORLD, CPU), printed.getvalue()


@pytest.mark.always("bytes-by formula", "gradient-largest error")
@pytest.mark.parametrize(
    ("broken", "said"), [("", ""), ("nan", "error nan"), ("bytes", "by formula"), ("gradient", "largest error")]
)
def test_check_passes_at_an_odd_length_and_fails_on_nan_and_on_wrong_bytes(broken, said):
    assert all(passed == (not broken) and said in printed for passed, printed in run_ranks(2, check, broken))


@pytest.mark.parametrize("failing", [None, (1, 1), (7, 1), (7, 2)])
def test_one_case_that_fails_fails_the_script(failing, monkeypatch, capsys):
    seen: list[tuple] = []
    monkeypatch.setattr(script, "check", lambda *case: seen.append(case[:2]) or case[:2] != failing)
    monkeypatch.setattr(sys, "argv", ["fpdt.py", "--chunks", "7"])
    assert script.main() == bool(failing) and seen == [(1, 1), (7, 1), (7, 2)]
    assert capsys.readouterr().out == ("FAIL\n" if failing else "PASS\n")


@pytest.mark.parametrize(("options", "chunks"), [("", 4), ("--chunks 1", 1), ("--chunks 25", 25)])
def test_the_script_trains_in_4_chunks_or_in_as_many_as_it_is_told(options, chunks, monkeypatch):
    seen: list[tuple] = []
    monkeypatch.setattr(script, "check", lambda *case: seen.append(case[:3]) or True)
    monkeypatch.setattr(sys, "argv", ["fpdt.py", *options.split()])
    assert script.main() == 0 and seen == [(*case, 500) for case in ((1, 1), (chunks, 1), (chunks, 2))]


@pytest.mark.parametrize(
    ("argv", "ranks"),
    [
        *((["--chunks", value], 1) for value in ("0", "26", "nan")),
        (["--chunks", ""], 2),
        (["--chunk", "2"], 1),
        (["--nproc_per_node"], 3),
        (["--nproc_per_node"], 8),  # divides the query heads, and not the K/V heads
    ],
)
def test_a_bad_option_is_refused_in_one_line_that_names_it(argv, ranks):
    assert argv[0] in refusal(script.main, argv if argv != ["--nproc_per_node"] else [], ranks)


def test_memory_that_is_freed_during_a_copy_is_not_reused(monkeypatch):
    """No GPU is needed to see that a copy waits and runs in its own stream, and that the allocator is told of it."""
    calls: list = []

    class Fake:
        def __init__(self, is_cuda: bool) -> None:
            self.is_cuda = is_cuda

        def copy_(self, src: "Fake", non_blocking: bool) -> None:
            assert non_blocking, "the program would wait for the copy"
            calls.append("copied")

        def record_stream(self, stream: str) -> None:
            calls.append(stream)

    class Event:
        def record(self, stream: str) -> None:
            calls.append(f"end of {stream}")

        def wait(self) -> None:
            calls.append("waited")

    @contextlib.contextmanager
    def inside(stream: str):
        calls.append(f"into {stream}")
        yield
        calls.append(f"out of {stream}")

    streams = iter(("h2d", "d2h"))
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(streams))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    offloader = script.HostOffloader(torch.device("cuda"))
    offloader.start_copy("d2h", Fake(is_cuda=False), Fake(is_cuda=True), [Event()], "q0")
    assert calls == ["into d2h", "waited", "copied", "out of d2h", "d2h", "end of d2h"]
    offloader.start_copy("h2d", Fake(is_cuda=True), Fake(is_cuda=False), [offloader.record_event("compute")], "kv0")
    assert calls[6:] == ["end of None", "into h2d", "waited", "copied", "out of h2d", "end of h2d"]
    assert offloader.num_buffers == 2
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, pin_memory: pin_memory)
    x = torch.ones(2)
    assert offloader.empty_host(x) and not script.HostOffloader(CPU).empty_host(x), "a GPU copies from pinned memory"
