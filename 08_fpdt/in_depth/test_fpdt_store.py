"""The store: right bytes, the right order of events, and every missing wait is a race."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fpdt_store import (
    Buffer,
    CpuMachine,
    CudaMachine,
    DeviceMemory,
    Prefetch,
    Race,
    Store,
    check_chunks,
    check_host,
    main,
)
from harness.layout import ROOT
from harness.meter import peak_memory
from harness.programs import refusal

CPU = torch.device("cpu")
HERE, STAND_IN = Path(__file__).parent, ROOT / "tests/fake_device"
FAKE = {"PYTHONPATH": f"{STAND_IN}{os.pathsep}{HERE}", "FAKE_GPUS": "1", "CUDA_VISIBLE_DEVICES": ""}
with_a_stand_in = pytest.mark.skipif(not STAND_IN.exists(), reason="an exercise is checked without a stand-in GPU")


def offloaded(store: Store, count: int) -> list:
    hosts = []
    for n in range(count):
        store.compute("make")
        hosts.append(store.offload(torch.full((8,), float(n))))
    return hosts


def walk(store: Store, keys: list[int], hosts: list, sets: int = 2) -> list[float]:
    seen, prefetch = [], Prefetch(store, keys, lambda key: [hosts[key]], CPU, sets)
    for _ in keys:
        [slot] = prefetch.take()
        store.compute("use", 1, reads=[slot])
        seen.append(slot.data[0].item())
        prefetch.done()
    return seen


class Forgetful(CpuMachine):
    """Leaves out the waits of one stream for another."""

    def __init__(self, who: str, whom: str) -> None:
        super().__init__()
        self.pair = (who, whom)

    def wait(self, stream, event):
        known = dict(event)
        if stream == self.pair[0]:
            known[self.pair[1]] = 0
        super().wait(stream, known)


# -------------------------------------------------------------------------------------------------------- what arrives


@pytest.mark.parametrize("sets", [1, 2, 3])
@pytest.mark.parametrize("keys", [[0], [0, 1], [3, 0, 3, 3, 1, 2, 0]])
def test_every_key_finds_its_own_chunk_in_the_slots(keys, sets):
    store = Store(CpuMachine())
    assert walk(store, keys, offloaded(store, 4), sets) == [float(k) for k in keys]


def test_bytes_over_the_link_and_on_the_host_are_counted_exactly():
    store = Store(CpuMachine(), host_limit=4 * 32)
    hosts = offloaded(store, 4)
    walk(store, [0, 1, 2, 3, 0], hosts)
    assert (store.offloaded, store.fetched, store.host_peak) == (4 * 32, 5 * 32, 4 * 32)
    for host in hosts:
        store.drop(host)
    offloaded(store, 4)
    assert (store.host_bytes, store.allocated) == (4 * 32, 4 * 32), "host buffers are not reused"
    with pytest.raises(MemoryError, match="160 of 128 bytes"):
        offloaded(store, 1)


def test_a_key_may_have_fewer_buffers_than_another_and_gets_only_its_own():
    store = Store(CpuMachine())
    hosts = offloaded(store, 3)
    prefetch = Prefetch(store, [1, 2, 2, 1], lambda count: hosts[:count], CPU)  # a set grows, another shrinks
    lengths = []
    for _ in range(4):
        lengths.append(len(prefetch.take()))
        prefetch.done()
    assert lengths == [1, 2, 2, 1]


def test_the_device_holds_two_slots_however_many_chunks_there_are():
    for count in (3, 9):
        store = Store(CpuMachine())
        hosts = offloaded(store, count)
        with peak_memory() as meter, DeviceMemory() as memory:
            prefetch = Prefetch(store, range(count), lambda n, hosts=hosts: [hosts[n]], CPU)
            for _ in range(count):
                prefetch.take()
                prefetch.done()
            del prefetch
        assert (meter.peak, memory.peak, memory.current) == (2 * 32, 2 * 32, 0)


def test_free_buffers_of_another_shape_make_room_for_new_ones_and_those_of_another_dtype_are_not_taken():
    store = Store(CpuMachine(), host_limit=100)
    for length in (10, 12):  # 4 bytes each, in turn
        kept = store.offload(torch.zeros(length))
        store.drop(store.offload(torch.zeros(length)))
        store.drop(kept)
        assert (store.host_bytes, store.allocated, store.host_peak) == (0, 2 * 4 * length, 2 * 4 * length)
    store.offload(torch.zeros(12))
    with pytest.raises(MemoryError, match="would need 104 of 100 bytes"):
        store.offload(torch.zeros(14))
    store = Store(CpuMachine())
    store.drop(store.offload(torch.zeros(12)))
    wide = store.offload(torch.zeros(12).double())
    assert (wide.data.dtype, store.allocated) == (torch.float64, 4 * 12 + 8 * 12), "in another dtype it would round"
    assert store.host_peak == 8 * 12, "of buffers in use"


def test_a_device_of_limited_size_refuses_what_does_not_fit():
    with pytest.raises(MemoryError, match="of 100 bytes"), DeviceMemory(100):
        keep = [torch.zeros(20) for _ in range(2)]
        del keep
    with pytest.raises(MemoryError, match="would need 32 of 0 bytes"):
        offloaded(Store(CpuMachine(), host_limit=0), 1)
    with DeviceMemory(160):  # this just fits
        keep = [torch.zeros(20) for _ in range(2)]
        del keep


# --------------------------------------------------------------------------------------------------------- who waits


def test_the_next_fetch_is_given_out_before_the_computation_with_this_chunk():
    store = Store(CpuMachine(record=True))
    hosts = offloaded(store, 3)
    walk(store, [0, 1, 2, 0, 1], hosts)
    ops = store.machine.ops
    fetches, uses = ([place for place, op in enumerate(ops) if op.name == name] for name in ("fetch", "use"))
    for n in range(4):
        assert fetches[n + 1] < uses[n], f"fetch {n + 1} is given out after the use of chunk {n}"
        # three "make"s, then the uses: fetch n+1 may wait for use n-1, whose slot it takes, and for no later one
        assert ops[fetches[n + 1]].after["compute"] <= 3 + n, f"fetch {n + 1} waits for the use of chunk {n}"


def test_with_one_buffer_a_fetch_waits_for_the_use_before_it():
    store = Store(CpuMachine(record=True))
    walk(store, [0, 1, 2], offloaded(store, 3), sets=1)
    assert [op.after["compute"] for op in store.machine.ops if op.stream == "fetch"] == [3, 4, 5]


@pytest.mark.parametrize(
    ("who", "whom", "what"),
    [
        ("offload", "compute", r"offload \(offload\) reads .* its computation"),
        ("fetch", "offload", r"fetch \(fetch\) reads .* offload"),
        ("compute", "fetch", r"use \(compute\) reads .* fetch"),
        ("fetch", "compute", r"fetch \(fetch\) overwrites .*"),
    ],
)
def test_each_missing_wait_is_a_race_every_time(who, whom, what):
    store = Store(Forgetful(who, whom))
    with pytest.raises(Race, match=what):
        walk(store, [0, 1, 2, 0], offloaded(store, 3))


def test_a_host_buffer_that_is_used_again_waits_for_the_fetch_that_still_reads_it():
    def reuse(machine: CpuMachine) -> None:
        store = Store(machine)
        hosts = offloaded(store, 2)
        prefetch = Prefetch(store, [0, 1], lambda n: [hosts[n]], CPU)
        prefetch.take()
        for host in hosts:
            store.drop(host)  # their fetches have been given out, and may not have begun
        offloaded(store, 2)

    reuse(CpuMachine())
    with pytest.raises(Race, match=r"offload \(offload\) overwrites a buffer without waiting for: fetch"):
        reuse(Forgetful("offload", "fetch"))


def test_a_slot_that_goes_home_is_not_refilled_before_it_has_left():
    def there_and_back(machine: CpuMachine) -> None:
        store = Store(machine)
        hosts = offloaded(store, 4)
        prefetch = Prefetch(store, range(4), lambda n: [hosts[n]], CPU)
        for n in range(4):
            [slot] = prefetch.take()
            store.compute("add", writes=[slot])
            slot.data += 1
            store.offload(slot, into=hosts[n])
            prefetch.done()
        assert [host.data[0].item() for host in hosts] == [1, 2, 3, 4]

    there_and_back(CpuMachine())
    with pytest.raises(Race, match="fetch"):
        there_and_back(Forgetful("fetch", "offload"))


def test_events_are_handed_on_so_nobody_waits_twice():
    """offload -> fetch -> compute: the computation has waited for the offload as well."""
    machine = CpuMachine()
    machine.launch("offload", "offload", 1)
    machine.wait("fetch", machine.record("offload"))
    machine.launch("fetch", "fetch", 1)
    machine.wait("compute", machine.record("fetch"))
    assert machine.clock["compute"] == {"compute": 0, "fetch": 1, "offload": 1}


# ---------------------------------------------------------------------------------------------------------- bad input


def test_too_little_host_memory_is_found_before_anything_starts(monkeypatch):
    with pytest.raises(ValueError, match="use fewer tokens"):
        check_host(10**18)
    monkeypatch.setenv("HOST_MEMORY", "0.5")  # GiB
    check_host(2**29)
    with pytest.raises(ValueError, match="536,870,913 bytes and 536,870,912 are free"):
        check_host(2**29 + 1)
    monkeypatch.delenv("HOST_MEMORY")
    monkeypatch.setattr(Path, "read_text", lambda path: "MemFree: 9 kB\nMemAvailable:    3 kB\n")
    check_host(3072)
    with pytest.raises(ValueError, match="3,073 bytes and 3,072 are free"):
        check_host(3073)
    check_chunks(2048)  # as many as it says
    monkeypatch.setattr(Path, "read_text", lambda path: "MemFree: 9 kB\n")  # not Linux: all that there is
    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with pytest.raises(ValueError, match=f" and {everything:,} are free"):
        check_host(everything + 1)
    monkeypatch.setenv("HOST_MEMORY", "0.0001")
    assert "need 196,608 bytes and 107,374 are free" in refusal(main)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--chunks", "0"], "use 1 or more"),
        (["--elements", "-3"], "use 1 or more"),
        (["--elements", "9" * 14], "use fewer tokens"),
        (["--chunks", "2049"], "2,100,225 pairs, one after the other; use 2048 or fewer"),
        (["--versio", "x"], "unrecognized"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_2(arguments, words, monkeypatch):
    monkeypatch.setattr("fpdt_store.demo", lambda *_: pytest.fail(f"{' '.join(arguments)} is let through"))
    said = refusal(main, arguments)
    assert arguments[0] in said and words in said


def test_the_demo_ends_with_pass_and_with_one_slot_where_two_are_promised_it_fails(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version in ("single", "double"):
        monkeypatch.setattr(sys, "argv", ["fpdt_store.py", "--version", version, "--elements", "16"])
        assert main() == 0
        assert capsys.readouterr().out.splitlines()[-1] == "PASS"
    monkeypatch.setattr("fpdt_store.Prefetch", lambda *given: Prefetch(*given[:-1], 1))
    assert main() == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAIL: fetches beside a computation")


def test_no_pinned_memory_is_one_clear_line(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("CUDA error: no room\nmore lines")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(MemoryError, match="no pinned memory for 64 bytes .CUDA error: no room.; raise"):
        CudaMachine.host_empty(None, torch.Size([8]), torch.float64)


def test_memory_that_python_frees_under_a_copy_is_not_given_away(monkeypatch):
    """No GPU is needed to see that the allocator is told which stream still uses a tensor, on both ways."""
    told = []

    class Fake:
        def __init__(self, name: str, is_cuda: bool) -> None:
            self.name, self.is_cuda, self.nbytes = name, is_cuda, 1

        def copy_(self, other, non_blocking):
            assert non_blocking, "the program would wait for the copy"

        def record_stream(self, stream):
            told.append((self.name, stream))

    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    machine = object.__new__(CudaMachine)
    machine.streams = {"fetch": "the fetch stream", "offload": "the offload stream"}
    host, device = Buffer(Fake("host", False)), Buffer(Fake("device", True))
    machine.copy("offload", host, device)
    machine.copy("fetch", device, host)
    assert told == [("device", "the offload stream"), ("device", "the fetch stream")]


ON_A_GPU = """
import torch
from fpdt_store import CudaMachine, Store

device = torch.device("cuda", 0)
store = Store(CudaMachine(device))
x = torch.ones(4, device=device)
hosts = [store.offload(x * n) for n in range(3)]  # nobody else holds what is being sent
x += 1  # here the stand-in says what has been given away too early
for host in hosts:
    slot = store.device_empty(host, device)
    store.fetch(host, slot)
    del slot  # which is being filled
    x += 1
store.fetch(hosts[2], slot := store.device_empty(hosts[2], device))
del host, hosts, store  # the host buffers, while the last is being read
x += 1
torch.cuda.current_stream().wait_event(slot.written)
assert slot.data.tolist() == [2.0] * 4
print("PASS")
"""


@pytest.mark.prove
@with_a_stand_in
def test_on_a_stand_in_gpu_nothing_that_is_still_copied_is_given_away():
    command = [sys.executable, "-c", ON_A_GPU]
    done = subprocess.run(command, env=os.environ | FAKE, capture_output=True, text=True, timeout=120)
    assert done.stdout == "PASS\n", done.stdout + done.stderr[-900:]
