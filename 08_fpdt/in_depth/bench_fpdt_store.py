"""The store: copies counted, and what may run beside a computation with 1, 2, 3 slots; on a GPU, what does.

    python 08_fpdt/in_depth/bench_fpdt_store.py   from the recorder: writes the result 08_fpdt_store
    python 08_fpdt/in_depth/bench_fpdt_store.py --gpu [--out DIR]   one GPU, real streams and pinned memory: GB/s, ms
    python 08_fpdt/in_depth/bench_fpdt_store.py --gpu --dry --out DIR     the same program on the CPU, with tiny sizes

A walk reads chunks from the host, one after the other, and computes with each. First the results and the
number of copies have to be right, and a machine without any one of the four waits must raise a race. Only
then is anything written. On a GPU every chunk's sum is checked after every walk.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from fpdt_costs import idle_time
from fpdt_store import Buffer, CpuMachine, DeviceMemory, Op, Prefetch, Race, Store, machine_for
from harness import predictions
from harness.ceilings import Table, device_here
from harness.report import median_seconds, write_result
from torch import Tensor

CHUNKS, ELEMENTS = 12, 64
WAITS = (("offload", "compute"), ("fetch", "offload"), ("compute", "fetch"), ("fetch", "compute"))


class Forgetful(CpuMachine):
    """Leaves out the waits of one stream for another."""

    def __init__(self, who: str, whom: str) -> None:
        super().__init__()
        self.who, self.whom = who, whom

    def wait(self, stream: str, event: dict[str, int]) -> None:
        kept = {other: tick for other, tick in event.items() if (stream, other) != (self.who, self.whom)}
        super().wait(stream, kept)


def chunk(n: int, elements: int, device: torch.device) -> Tensor:
    return torch.full((elements,), float(n + 1), device=device)


def store_all(store: Store, count: int, elements: int, device: torch.device) -> list[Buffer]:
    hosts = []
    for n in range(count):
        store.compute("make")
        hosts.append(store.offload(chunk(n, elements, device)))
    return hosts


def walk(
    store: Store, hosts: list[Buffer], device: torch.device, sets: int, work: Callable[[Tensor], Tensor]
) -> Tensor:
    """The results of `work` for every chunk, in order. `work` must not make the host wait for the device."""
    prefetch, found = Prefetch(store, range(len(hosts)), lambda n: [hosts[n]], device, sets), []
    for _ in hosts:
        [slot] = prefetch.take()
        store.compute("use", 1, reads=[slot])
        found.append(work(slot.data))
        prefetch.done()
    return torch.stack(found)


def expected(count: int, elements: int, device: torch.device) -> Tensor:
    return torch.arange(1, count + 1, device=device, dtype=torch.float32) * elements


# ------------------------------------------------------------------------------------------------------ the recorder


def verify() -> None:
    """Exit unless each missing wait raises a race, every time."""
    cpu = torch.device("cpu")
    for who, whom in WAITS:
        try:
            store = Store(Forgetful(who, whom))
            walk(store, store_all(store, 4, ELEMENTS, cpu), cpu, 2, torch.sum)
        except Race:
            continue
        sys.exit(f"{who} does not wait for {whom}, and the check does not notice")
    store = Store(CpuMachine())  # host buffers returned with fetches in flight, then reused
    hosts = store_all(store, 2, ELEMENTS, cpu)
    prefetch = Prefetch(store, range(2), lambda n: [hosts[n]], cpu)
    prefetch.take()
    for host in hosts:
        store.drop(host)
    store_all(store, 2, ELEMENTS, cpu)
    if store.allocated != 2 * 4 * ELEMENTS:
        sys.exit(f"{store.allocated} bytes of host buffers for {2 * 4 * ELEMENTS}: they are not used again")


def counted(sets: int) -> list:
    """One row: the counts of a walk with `sets` slots."""
    cpu, size = torch.device("cpu"), 4 * ELEMENTS
    store = Store(machine := CpuMachine(record=True))
    with DeviceMemory() as memory:
        hosts = store_all(store, CHUNKS, ELEMENTS, cpu)
        made = memory.peak
        got = walk(store, hosts, cpu, sets, torch.sum)
    if not torch.equal(got, expected(CHUNKS, ELEMENTS, cpu)):
        sys.exit(f"{sets} slots: a walk finds {got.tolist()}")
    fetches = [op for op in machine.ops if op.stream == "fetch"]
    # Before the first use CHUNKS pieces were computed; a fetch overlaps use n unless it waits for its end.
    beside = sum(op.after["compute"] < CHUNKS + n for n, op in enumerate(fetches) if n)
    idle = {f: idle_time(machine.ops, lambda op, f=f: seconds(op, f)) for f in (0.5, 1.0, 2.0)}
    for f, got_idle in idle.items():
        want = CHUNKS * f if sets == 1 else f + (CHUNKS - 1) * max(0.0, f - 1)
        if not abs(got_idle - want) < 1e-9:
            sys.exit(f"{sets} slots, a fetch of {f}: the computation waits {got_idle}, predicted {want}")
    slots = memory.peak - 2 * 4 * CHUNKS  # plus the results, single and in one tensor
    predicted = [CHUNKS, CHUNKS * size, (CHUNKS - 1) * (sets > 1)]
    row = [len(fetches), store.fetched, beside]
    if (
        row != predicted
        or store.offloaded != CHUNKS * size
        or store.host_peak != CHUNKS * size
        or made > size
        or slots != sets * size
    ):
        sys.exit(f"{sets} slots: {row} fetches, bytes and fetches beside a computation, predicted {predicted}")
    return [sets, *row, slots // size, *(f"{x / CHUNKS:.0%}" for x in idle.values())]


def seconds(op: Op, fetch: float) -> float:
    return {"use": 1.0, "fetch": fetch}.get(op.name, 0.0)


def record() -> None:
    verify()
    rows = [counted(sets) for sets in (1, 2, 3)]
    write_result(
        "08_fpdt_store",
        f"A walk over {CHUNKS} chunks on the host, by the recorder: one slot on the device, two, three",
        [
            "slots",
            "fetches",
            "bytes fetched",
            "fetches that may run beside a computation",
            "chunks on the device at most",
            "idle, if a fetch takes half a computation",
            "as long",
            "twice as long",
        ],
        rows,
        f"Chunks of {4 * ELEMENTS} bytes. Idle: time in which the computation waits, of the time it computes; "
        "simulated from the record, and equal to the closed form.",
        computed=True,
    )


# ------------------------------------------------------------------------------------------------------------- on a GPU


def copies(device: torch.device, sizes: tuple[int, ...], repeats: int, out: Path | None) -> None:
    """GB/s of single copies, each way, from pinned and from ordinary memory."""
    cuda, machine, gpu = device.type == "cuda", machine_for(device), predictions.here()
    table = Table(
        "08_fpdt_link",
        "Copies between host and device, GB/s, by size",
        [
            "bytes",
            "pinned, to the device",
            "pinned, to the host",
            "pageable, to the device",
            "pageable, to the host",
            "pinned, predicted",
        ],
        "One copy at a time, from the call until it is done; medians. Predicted: 10 µs for a call and its end, and the "
        "bytes at 85 % of the link's data sheet.",
        out,
    )
    for size in sizes:
        there = torch.full((size // 4,), 1.0, device=device)
        rates = []
        for host in (machine.host_empty(there.shape, there.dtype), torch.empty(there.shape)):
            host.fill_(2.0)
            for to, source in ((there, host), (host, there)):
                took = median_seconds(lambda to=to, source=source: to.copy_(source, non_blocking=True), repeats)
                if not torch.equal(to.cpu(), source.cpu()):
                    sys.exit(f"a copy of {size} bytes brings other numbers")
                rates.append(round(size / took / 1e9, 2) if cuda else "n/a on CPU")
        table.add(size, *rates, round(size / (1e-5 + size / (0.85 * gpu.link)) / 1e9, 2) if gpu else "-")


def overlaps(device: torch.device, sizes: tuple[int, ...], repeats: int, out: Path | None) -> None:
    """Milliseconds of a walk with one slot and with two, next to only its copies and only its computation."""
    cuda, machine = device.type == "cuda", machine_for(device)
    table = Table(
        "08_fpdt_overlap",
        f"A walk over {CHUNKS} chunks on the host, in ms: what two slots hide",
        [
            "bytes of a chunk",
            "computations / fetches",
            "fetches alone",
            "computations alone",
            "one slot",
            "two slots",
            "hidden, of the shorter",
            "two slots, predicted",
        ],
        "Computations: matrix products. Every chunk's sum was checked. Medians. Predicted by"
        " a closed form: first fetch, then the longer of both, last computation; from the two columns 'alone'.",
        out,
    )
    for size in sizes:
        elements, store = size // 4, Store(machine)
        hosts = store_all(store, CHUNKS, elements, device)
        want = expected(CHUNKS, elements, device)
        side = 2048 if size >= 2**20 else 32
        a = torch.randn(side, side, device=device, dtype=torch.bfloat16)
        here = torch.ones(elements, device=device)
        one = median_seconds(lambda a=a: a @ a, repeats)
        fetch = median_seconds(partial(walk, store, hosts, device, 2, torch.sum), repeats) / CHUNKS
        for share in (0.5, 1.0, 2.0):
            products = max(1, min(round(share * fetch / one), 1000 if size >= 2**20 else 3))

            def work(x: Tensor, products: int = products, a: Tensor = a) -> Tensor:
                for _ in range(products):
                    a @ a
                return x.sum()

            compute = median_seconds(lambda work=work, x=here, hosts=hosts: [work(x) for _ in hosts], repeats)
            walks = []
            for sets in (1, 2):
                run = partial(walk, store, hosts, device, sets, work)
                walks.append(median_seconds(run, repeats))
                if not torch.allclose(run(), want, rtol=1e-5):
                    sys.exit(f"a walk with {sets} slots reads other chunks than were stored")
            hidden = (walks[0] - walks[1]) / min(CHUNKS * fetch, compute)
            foreseen = fetch + (CHUNKS - 1) * max(fetch, compute / CHUNKS) + compute / CHUNKS
            times = [round(1e3 * x, 3) for x in (CHUNKS * fetch, compute, *walks, foreseen)]
            cells = [round(compute / (CHUNKS * fetch), 2), *times[:-1], f"{hidden:.0%}", times[-1]]
            table.add(size, *(cells if cuda else ["n/a on CPU"] * len(cells)))


def measure(dry: bool, out: Path | None) -> None:
    verify()
    device, repeats = device_here(), 2 if dry else 20
    copies(device, (2**10, 2**12) if dry else (2**28, 2**24, 2**20, 2**16), repeats, out)
    overlaps(device, (2**10,) if dry else (2**26, 2**22), repeats, out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="measure on the GPU")
    parser.add_argument("--dry", action="store_true", help="with --gpu: the same program on the CPU, tiny")
    parser.add_argument("--out", type=Path, help="folder for the results of --gpu; default results/")
    args = parser.parse_args()
    if args.dry and not (args.gpu and args.out):
        print("bench_fpdt_store.py: --dry goes with --gpu and --out DIR: its numbers are no results", file=sys.stderr)
        return 2
    if args.gpu and not args.dry and not torch.cuda.is_available():
        print("bench_fpdt_store.py: --gpu finds no GPU here; --gpu --dry --out DIR tries it out", file=sys.stderr)
        return 2
    if args.gpu:
        measure(args.dry, args.out)
    else:
        record()
    return 0


if __name__ == "__main__":
    sys.exit(main())
