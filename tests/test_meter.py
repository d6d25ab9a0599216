"""The meter: its counts against numbers worked out by hand, against torch's own tools and the operating system."""

import gc
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from harness.meter import (
    bytes_on_the_wire,
    communication,
    held_bytes,
    loopback_bytes,
    peak_memory,
    saved_activations,
    storage_bytes,
)
from harness.ranks import run_ranks
from torch import nn


def test_held_bytes_of_a_model_with_adam():
    model = nn.Linear(10, 20)  # 220 parameters
    optimizer = torch.optim.AdamW(model.parameters())
    assert held_bytes(model, optimizer) == held_bytes(model) and held_bytes(model).total == 880
    model(torch.randn(3, 10)).sum().backward()
    assert (held_bytes(model).gradients, held_bytes(model, optimizer).optimizer) == (880, 0)
    optimizer.step()
    held = held_bytes(model, optimizer)
    assert (held.parameters, held.gradients, held.optimizer, held.total) == (880, 880, 2 * 880, 4 * 880)


def test_tied_weights_count_once_and_a_small_view_counts_its_whole_storage():
    a, b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    b.weight = a.weight
    assert held_bytes(nn.ModuleList([a, b])).parameters == 64
    big = torch.zeros(1000)
    assert storage_bytes([big[:1], big[5:7]]) == 4000


def test_saved_activations_of_two_layers():
    first, second = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
    x = torch.randn(5, 8)
    parameters = [*first.parameters(), *second.parameters()]
    with saved_activations(exclude=parameters) as saved:
        second(torch.relu(first(x)))
    # The input of the first layer (5·8), and the output of relu (5·16), which is also the second layer's input.
    assert saved.bytes == 4 * (5 * 8 + 5 * 16)
    with saved_activations() as everything:
        second(torch.relu(first(x)))
    # x needs no gradient, so the first layer's weight is not needed in backward and not saved; the second's is.
    assert everything.bytes == saved.bytes + 4 * 16 * 8


def test_saved_activations_of_a_checkpointed_block_are_its_input():
    block = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    x = torch.randn(4, 8, requires_grad=True)
    with saved_activations(exclude=block.parameters()) as plain:
        y = block(x)
    with saved_activations(exclude=block.parameters()) as checkpointed:
        z = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    assert checkpointed.bytes == x.nbytes < plain.bytes
    assert torch.equal(y, z)


def test_peak_memory_by_hand():
    before = torch.zeros(1000)
    with peak_memory() as memory:
        a = torch.zeros(100)  # 400
        b = a + 1  # 800
        del a  # 400
        c = b * 2  # 800
        before.add_(1)  # nothing new
        d = b.view(10, 10)[2:4]  # a view: nothing new
        del b, c  # 400: d keeps b's storage
        e = torch.zeros(175)  # 1100
        del e
    assert memory.peak == 1100
    assert memory.current == d.untyped_storage().nbytes() == 400


def test_peak_memory_follows_backward_and_resized_storages():
    w = torch.randn(50, 50, requires_grad=True)
    with peak_memory() as memory:
        (w * w).sum().backward()
        gc.collect()
    assert w.grad is not None
    assert memory.current == w.grad.nbytes
    # w·w alive until sum has run; then the expanded gradient and grad·w, twice, added into one.
    assert w.nbytes * 2 <= memory.peak <= w.nbytes * 4
    x = torch.zeros(100)
    with peak_memory() as memory:
        y = torch.zeros(100)
        y.untyped_storage().resize_(0)
        assert memory.current == 0
        y.untyped_storage().resize_(4000)
        assert memory.current == 4000
        x.untyped_storage().resize_(0)
    assert memory.peak == 4000


def test_peak_memory_agrees_with_torchs_own_tracker():
    from torch.distributed._tools.mem_tracker import MemTracker

    def step():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()

    with peak_memory() as ours:
        step()
    tracker = MemTracker()
    with tracker:
        step()
    theirs = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert ours.peak == theirs


def held_by_a_thread_of_gloos(look):
    """Bytes alive, or at most, when a thread with the name of gloo's still holds what this one has let go of."""
    big, begun = torch.randn(1000, 1000), threading.Event()

    def carry(held: list[torch.Tensor]) -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_late")
        begun.set()
        for _ in range(3):  # at work without Python's lock, as a thread in C++ is
            torch.mm(big, big)
        held.clear()

    with peak_memory() as memory:
        x = torch.ones(100)
        dist.all_reduce(x)
        thread = threading.Thread(target=carry, args=([x],))
        thread.start()
        begun.wait()
        del x
        alive = memory.current if look else None
        torch.ones(100)
    thread.join()
    return alive if look else memory.peak


def test_what_only_a_thread_of_gloos_still_holds_is_not_counted():
    assert run_ranks(1, held_by_a_thread_of_gloos, True) == [0]
    assert run_ranks(1, held_by_a_thread_of_gloos, False) == [400]


def test_bytes_on_the_wire_by_hand():
    assert bytes_on_the_wire("all_reduce", 1200, 4) == 1800
    assert bytes_on_the_wire("all_reduce", 10, 4) == 15
    assert bytes_on_the_wire("all_gather", 1200, 3) == bytes_on_the_wire("reduce_scatter", 1200, 3) == 800
    assert bytes_on_the_wire("all_to_all", 1200, 4, own=300) == 900
    assert [bytes_on_the_wire("broadcast", 8, 4, rank, root=2) for rank in range(4)] == [8, 0, 8, 8]
    assert [bytes_on_the_wire("reduce", 8, 4, rank, root=2) for rank in range(4)] == [8, 8, 0, 8]
    assert [bytes_on_the_wire("scatter", 8, 4, rank) for rank in range(4)] == [6, 0, 0, 0]
    assert [bytes_on_the_wire("gather", 8, 4, rank) for rank in range(4)] == [0, 2, 2, 2]
    assert all(bytes_on_the_wire(name, 64, 1) == 0 for name in ("all_reduce", "broadcast", "send"))


def every_collective():
    rank, size = dist.get_rank(), dist.get_world_size()
    full, shard = torch.ones(6 * size), torch.ones(6)  # 24·P bytes and 24 bytes
    with communication() as sent:
        dist.all_reduce(full)
        dist.all_reduce(full.to(torch.bfloat16), async_op=True).wait()
        dist.broadcast(full, 1)
        dist.reduce(full, 1)
        dist.all_gather_into_tensor(full, shard)
        dist.all_gather(list(full.chunk(size)), shard)
        dist.reduce_scatter_tensor(shard, full)
        dist.all_to_all_single(torch.empty_like(full), full)
        splits = [2 if peer == rank else 1 for peer in range(size)]
        dist.all_to_all_single(torch.empty(size + 1), torch.ones(size + 1), splits, splits)
        dist.gather(shard, list(full.chunk(size)) if rank == 0 else None, 0)
        dist.scatter(shard, list(full.chunk(size)) if rank == 0 else None, 0)
        dist.barrier()
        if rank == 0:
            dist.send(shard, 1)
        elif rank == 1:
            dist.recv(shard, 0)
        functional.all_reduce(full, "sum", dist.group.WORLD).sum()
        functional.all_gather_tensor(shard, 0, dist.group.WORLD).sum()
    return dict(sent.calls), dict(sent.payload), dict(sent.sent), sent.total


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_is_counted_with_its_calls_payload_and_bytes(size):
    n = 24 * size
    for rank, (calls, payload, sent, total) in enumerate(run_ranks(size, every_collective)):
        p2p = {"send": 1} if rank == 0 else {"recv": 1} if rank == 1 else {}
        once = dict.fromkeys(["broadcast", "reduce", "reduce_scatter", "gather", "scatter", "barrier"], 1)
        assert calls == {"all_reduce": 3, "all_gather": 3, "all_to_all": 2} | once | p2p
        assert payload["all_reduce"] == n + n // 2 + n
        assert sent["all_reduce"] == 2 * (size - 1) * 60
        assert sent["all_gather"] == 3 * (size - 1) * 24
        assert sent["reduce_scatter"] == (size - 1) * 24
        assert sent["all_to_all"] == (size - 1) * 24 + (size - 1) * 4
        assert sent["broadcast"] == (n if rank != 0 else 0)  # rank 0 is last on the line that starts at 1
        assert sent["reduce"] == (0 if rank == 1 else n)
        assert sent["gather"] == (0 if rank == 0 else 24)
        assert sent["scatter"] == ((size - 1) * 24 if rank == 0 else 0)
        assert sent.get("send", 0) == (24 if rank == 0 else 0)
        assert total == sum(sent.values())


def ddp_traffic():
    model = nn.parallel.DistributedDataParallel(nn.Linear(100, 10, bias=False))
    model(torch.ones(2, 100)).sum().backward()  # the first backward may rebuild the buckets
    with communication() as sent:
        model(torch.ones(2, 100)).sum().backward()
    return sent.calls["all_reduce"], sent.sent["all_reduce"]


def test_what_ddps_cpp_reducer_sends_is_counted():
    assert run_ranks(4, ddp_traffic) == [(1, 2 * 3 * 4000 // 4)] * 4


def dtensor_matmul():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(8, 16), mesh, [Shard(1)])  # 4·8·16 = 512 bytes, half of them here
    w = distribute_tensor(torch.ones(16, 4), mesh, [Shard(0)]).requires_grad_()
    with communication() as sent, peak_memory() as memory, saved_activations() as saved:
        y = (x @ w).redistribute(mesh, [Replicate()])  # partial sums, then an all-reduce of 8·4 numbers
    assert y.to_local()[0, 0].item() == 16
    return storage_bytes([x]), sent.payload["all_reduce"], memory.peak, saved.bytes


def test_behind_a_dtensor_the_tensors_of_this_rank_are_counted():
    # Kept is x, for w's gradient; w is not, as x needs none.
    for held, sent, peak, saved in run_ranks(2, dtensor_matmul):
        assert (held, sent, saved) == (256, 128, 256)
        assert 2 * 128 <= peak <= 3 * 128  # the product and what the all-reduce makes of it; 0 and 512 are of the whole


def slice_traffic():
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    with communication() as sent:
        dist.all_reduce(torch.ones(10), group=groups[dist.get_rank() % 2])
    return sent.events


def test_a_group_that_is_a_slice_is_counted_with_its_own_size():
    assert run_ranks(4, slice_traffic) == [[("all_reduce", 40, 2)]] * 4


def loopback_traffic(numel):
    x = torch.ones(numel)
    dist.all_reduce(x)  # connects the ranks
    windows = []
    for _ in range(5):
        dist.barrier()  # nobody sends before everybody is here
        before = loopback_bytes()
        dist.barrier()
        with communication() as sent:
            dist.all_reduce(x)
        dist.barrier()
        windows.append(loopback_bytes() - before)
    # Other programs use the loopback too; they only add. The smallest window is ours.
    return min(windows), bytes_on_the_wire("all_reduce", x.nbytes, dist.get_world_size()), sent.total


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc/net/dev to count bytes on the loopback")
def test_the_all_reduce_formula_is_what_the_operating_system_counts():
    results = run_ranks(4, loopback_traffic, 1_000_000)
    predicted = sum(total for _, total, _ in results)
    assert predicted == sum(counted for _, _, counted in results)
    measured = results[0][0]
    # Above the payload: headers of TCP and IP. Below: nothing.
    assert predicted <= measured < 1.1 * predicted


def unknown_operator():
    from harness import meter

    operators = dict(meter._OPERATORS)
    del meter._OPERATORS["c10d::allreduce_"]
    try:
        with communication():
            dist.all_reduce(torch.ones(1))
    finally:
        meter._OPERATORS.update(operators)


def test_an_operator_the_meter_does_not_know_is_an_error_not_zero_bytes():
    with pytest.raises(AssertionError, match="does not know how many bytes c10d::allreduce_"):
        run_ranks(1, unknown_operator)
