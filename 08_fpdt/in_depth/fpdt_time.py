"""FPDT V: the time of forward and backward, with one or two slots, on a shared link; and the best chunk.

Problem. fpdt_costs.py counts bytes, and says when a pair of chunks hides the fetch of its keys and values.
Training does more: forward also stores data for backward, all-to-alls block the computation, backward fetches
queries, outputs and gradients, and eight GPUs share a host with less than eight times the link. Which chunk?

Idea. The loops of fpdt_attention.py give the same work to the same streams every time. So their schedule can
be recorded once (`schedule`: the real `Store` and `Prefetch`, with tensors that have a size but no memory)
and simulated at any speed (`simulate`). That is exact, but slow for thousands of pairs. `forward_times` and
`backward_times` add up the same times, stream by stream; tests compare loops, schedule and sums.

    forward, row i    | project + all-to-all | own chunk |  pair  |idle|  pair  | ... | all-to-all |         compute
                      |    kv0    |   kv1   | ...                   fetch: i chunks of keys and values, each once
                      | k_i v_i q_i, then out_i lse_i               offload, for backward
    backward, row j   | own chunk | all-to-all of dq | pair | pair | ... | all-to-all of dk dv |           compute
                      | q out dout lse (dq) of chunk j, j+1, ...    fetch: not reduced by grouped-query heads
                      | dq of each pair                             offload, fetched again in the next row

Assumptions: a stream runs one operation at a time, at the speeds of `Hardware`, and each kernel or copy costs
`start` extra; the link carries both directions at once; GPUs share it equally at all times; all-to-alls are
on the computation's stream, which does nothing else meanwhile. Projections and feed-forward are left out:
they give the link more time. Of a chunk with itself half of the scores are computed.

Run it:
    python fpdt_time.py                              the best chunk: seconds and bytes by number of chunks
    python fpdt_time.py --seq 2097152 --ranks 4 --sharing 4 --memory-gb 4 --link-gb 25
    python fpdt_time.py --timeline                   the streams of forward and backward in 4 chunks
The last line is PASS, or the script exits with 1 and says which number is wrong.
"""

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from fpdt_costs import Hardware, Sizes, attention_peak, idle_time, pair_seconds, simulate
from fpdt_store import Buffer, CpuMachine, OneLineParser, Op, Prefetch, Store

LONG = 256  # chunks; beyond, the sums take too long and `steady` is close (2 %)

# ------------------------------------------------------------------------------------------------ how long each thing


def message_seconds(z: Sizes, h: Hardware, heads: int) -> float:
    """An all-to-all of one chunk, [c/P tokens, `heads` heads of all ranks]: kernel and sent bytes."""
    return h.start + z.c // z.P * heads * z.head_dim * z.e * (z.P - 1) / z.P / h.network


def seconds_of(op: Op, z: Sizes, h: Hardware) -> float:
    """Seconds of a recorded operation. Copies have bytes, attention (query, key) pairs, the rest a name."""
    kv_heads = z.n_kv * z.P
    if op.name == "before":
        return 0.0
    if op.stream != "compute":
        return h.copy(op.amount)
    if op.name in ("attend", "attend back"):
        t, _ = pair_seconds(z, h)
        t = t if op.name == "attend" else 2.5 * (t - h.start) + h.start  # five matmuls, not two
        return t if op.amount == z.c**2 else t / 2
    messages = {"project": (z.heads, kv_heads, kv_heads), "to tokens": (z.heads,), "dq to tokens": (z.heads,)}
    messages["dk, dv to tokens"] = (kv_heads, kv_heads)
    return sum(message_seconds(z, h, heads) for heads in messages.get(op.name, ()))


# -------------------------------------------------------------------------------------------- the loops, written down


class Blank(CpuMachine):
    """Records every operation and runs none: its tensors have a size but no memory."""

    def __init__(self) -> None:
        super().__init__(record=True)

    def copy(self, stream: str, to: Buffer, source: Buffer) -> None:
        self.launch(stream, stream, source.data.nbytes, reads=[source], writes=[to])

    def host_empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")


def schedule(z: Sizes, way: str, slots: int = 2) -> list[Op]:
    """The operations of `ChunkedAttention` by stream, "forward" (saving all for backward) or "backward"."""
    machine = Blank()
    store = Store(machine)
    meta = torch.device("meta")
    u = z.u
    size = dict(zip(("q", "k", "lse", "dq"), z.letters(), strict=False))
    size |= {"v": size["k"], "out": size["q"], "dout": size["q"]}
    host: dict[tuple[str, int], Buffer] = {}
    own = z.c * (z.c + 1) / 2
    whole = z.c * z.c

    def away(name: str, i: int, source: Buffer | None = None) -> None:
        tensor = source or torch.empty(size[name], dtype=torch.uint8, device=meta)
        host[name, i] = store.offload(tensor, into=host.get((name, i)))

    def bring(keys: Sequence, names: tuple[str, ...], of: int) -> Prefetch:
        return Prefetch(store, keys, lambda key: [host[name, key[of]] for name in names], meta, slots)

    if way == "forward":
        earlier = bring([(i, j) for i in range(u) for j in range(i)], ("k", "v"), 1)
        for i in range(u):
            store.compute("project")
            for name in ("k", "v", "q"):
                away(name, i)
            store.compute("attend", own)
            for _ in range(i):
                store.compute("attend", whole, reads=earlier.take())
                earlier.done()
            store.compute("finish")
            for name in ("out", "lse"):
                away(name, i)
            store.compute("to tokens")
        return machine.ops
    for i in range(u):
        for name in ("q", "k", "v", "out", "lse", "dout"):
            away(name, i)
    for op in machine.ops:
        op.name = "before"

    def queries(ji: tuple[int, int]) -> list[Buffer]:
        rest = ["dq"] if ji[0] > 0 and ji != (u - 1, u - 1) else []
        return [host[name, ji[1]] for name in ("dout", "q", "out", "lse", *rest)]

    inner = Prefetch(store, [(j, i) for j in range(u) for i in range(j, u)], queries, meta, slots)
    outer = bring([(j,) for j in range(u)], ("k", "v"), 0)
    for j in range(u):
        outer.take()
        for i in range(j, u):
            into = (*inner.take(), store.made(torch.empty(size["dq"], dtype=torch.uint8, device=meta)))[4]
            store.compute("attend back", own if i == j else whole, writes=[into])
            if i == j:
                store.compute("dq to tokens", reads=[into])
            elif (j, i) != (u - 2, u - 1):
                away("dq", i, into)
            inner.done()
        store.compute("dk, dv to tokens")
        outer.done()
    return machine.ops


def timeline(z: Sizes, h: Hardware, way: str, slots: int = 2) -> list[tuple[str, str, float, float]]:
    """(stream, name, start, end) of all that takes time."""
    ops = schedule(z, way, slots)
    spans = simulate(ops, lambda op: seconds_of(op, z, h))
    done = zip(ops, spans, strict=True)
    return [(op.stream, op.name, *span) for op, span in done if op.name != "before" and span[0] < span[1]]


def drawn(rows: Sequence[tuple[str, str, float, float]], width: int = 96) -> list[str]:
    """One line for each stream. # attention, x all-to-all, < to the device, > to the host, . nothing."""
    end = max(row[3] for row in rows)
    lines = []
    for stream in ("compute", "fetch", "offload"):
        line = ["."] * width
        for _, name, start, stop in (row for row in rows if row[0] == stream):
            sign = {"fetch": "<", "offload": ">"}.get(stream, "#" if name.startswith("attend") else "x")
            first, last = (int(when / end * width + 0.5) for when in (start, stop))
            last = max(last, first + (stream != "compute"))  # so a short copy is visible
            line[first:last] = sign * (last - first)
        lines.append(f"{stream:8} |{''.join(line[:width])}|")
    return lines


# --------------------------------------------------------------------------------------------- the same, by adding up


@dataclass(frozen=True)
class Seconds:
    """Seconds of each operation in a row of chunks, of `way` "forward" or "backward"."""

    own: float  # attention of a chunk to itself
    pair: float  # to another one
    kv: float  # copy k̂ or v̂ of a chunk, either way
    q: float  # copy q̂, the output or its gradient
    lse: float
    dq: float  # copy a sum of dq̂ to the device
    dq_out: float  # and to the host
    before: float  # all-to-alls. forward: of q, k, v.  backward: of the complete dq
    after: float  # all-to-alls. forward: of the output.  backward: of dk and dv


def seconds_table(z: Sizes, h: Hardware, way: str) -> Seconds:
    Q, K, L, Q_w, _ = z.letters()
    names = (
        ("attend", "project", "to tokens") if way == "forward" else ("attend back", "dq to tokens", "dk, dv to tokens")
    )
    pair, before, after = (seconds_of(Op("compute", name, z.c**2, {}), z, h) for name in names)
    kv, q, lse, dq = (h.copy(size) for size in (K, Q, L, Q_w))
    return Seconds(pair / 2, pair, kv, q, lse, dq, dq, before, after)


def forward_times(u: int, x: Seconds, slots: int = 2) -> tuple[float, float]:
    """(seconds until the computation is done, seconds it waits) of a forward that saves all for backward."""
    compute = fetch = offload = 0.0  # when each stream has done what it was given so far
    stored: list[tuple[float, float]] = []  # per chunk: when k̂ and v̂ are on the host
    full = [0.0] * slots
    read = [0.0] * slots
    keys = [j for i in range(u) for j in range(i)]

    def bring(n: int) -> None:
        nonlocal fetch
        if n < len(keys):
            for when in stored[keys[n]]:
                fetch = max(fetch, read[n % slots], when) + x.kv
            full[n % slots] = fetch

    n = 0
    for i in range(u):
        compute += x.before
        offload = max(offload, compute)
        stored.append((offload + x.kv, offload + 2 * x.kv))
        offload += 2 * x.kv + x.q
        compute += x.own
        for _ in range(i):
            if n == 0:
                read = [compute] * slots  # a new slot may be in memory that is still read
                for m in range(slots):
                    bring(m)
            compute = read[n % slots] = max(compute, full[n % slots]) + x.pair
            bring(n + slots)
            n += 1
        offload = max(offload, compute) + x.q + x.lse
        compute += x.after
    work = u * (x.before + x.own + x.after) + len(keys) * x.pair
    return compute, compute - work


def backward_times(u: int, x: Seconds, slots: int = 2) -> tuple[float, float]:
    """(seconds until the computation is done, seconds it waits) of a backward; dô is already on the host."""
    compute = fetch = offload = 0.0  # when each stream has done what it was given so far
    full = [0.0] * slots  # of each slot: when it is filled
    read = [0.0] * slots  # when it has been read
    left = [0.0] * slots  # when its dq̂ is stored
    keys_full = [0.0] * slots
    keys_read = [0.0] * slots
    home = [0.0] * u
    pairs = [(j, i) for j in range(u) for i in range(j, u)]

    def fetch_keys(j: int) -> None:
        nonlocal fetch
        if j < u:
            keys_full[j % slots] = fetch = max(fetch, keys_read[j % slots]) + 2 * x.kv

    def fetch_queries(n: int) -> None:
        nonlocal fetch
        if n < len(pairs):
            j, i = pairs[n]
            at = n % slots
            # --- exercise 8.35: when has a fetch of the backward arrived? ---
            fetch = max(fetch, read[at]) + 3 * x.q + x.lse
            if 0 < j < u - 1:  # the first keys start dq̂; for the last it is on the device
                fetch = max(fetch, left[at], home[i]) + x.dq
            full[at] = fetch
            # --- end exercise ---

    for n in range(slots):
        fetch_keys(n)
    for n in range(slots):
        fetch_queries(n)
    for n, (j, i) in enumerate(pairs):
        at = n % slots
        compute = max(compute, full[at], keys_full[j % slots]) + (x.own + x.before if i == j else x.pair)
        if i > j and (j, i) != (u - 2, u - 1):  # the next step needs that one, so it stays
            home[i] = offload = max(offload, compute) + x.dq_out
            left[at] = offload if j > 0 else left[at]
        read[at] = compute
        fetch_queries(n + slots)
        if i == u - 1:
            compute += x.after
            keys_read[j % slots] = compute
            fetch_keys(j + slots)
    work = u * (x.own + x.before + x.after) + (len(pairs) - u) * x.pair
    return compute, compute - work


def steady(u: int, x: Seconds, way: str, slots: int = 2) -> float:
    """Seconds for very many chunks, within 2 %: a pair takes the time of its computation, its fetches, or its
    share of a slot's cycle, the longest of them. Ends of rows are left out, except for longer stores."""
    fetch = 2 * x.kv if way == "forward" else 3 * x.q + x.lse + x.dq
    out = 0.0 if way == "forward" else max(0.0, x.dq_out - (fetch - x.dq))  # it leaves while all but dq̂ comes
    a_row = x.before + x.own + x.after
    stores = 2 * x.kv + 2 * x.q + x.lse if way == "forward" else 0.0
    a_pair = max(x.pair, fetch, (fetch + x.pair + out) / slots)
    return u * a_row + u * (u - 1) / 2 * a_pair if u * a_pair / 2 > stores else u * max(a_row, stores)


def attention_seconds(z: Sizes, h: Hardware, way: str, slots: int = 2) -> tuple[float, float]:
    """(seconds, seconds that the computation waits) of attention of one layer, "forward" or "backward"."""
    x = seconds_table(z, h, way)
    if z.u <= LONG:
        return (forward_times if way == "forward" else backward_times)(z.u, x, slots)
    total = steady(z.u, x, way, slots)
    return total, total - z.u * (x.own + x.before + x.after) - z.u * (z.u - 1) // 2 * x.pair


# -------------------------------------------------------------------------------------------------- how large a chunk?


def smallest_hidden_chunk(z: Sizes, h: Hardware, way: str = "forward") -> float:
    """c*: the number of tokens from which computation hides the fetches of a pair, without starting costs.

    Backward fetches three chunks of queries' size, dq̂ and lse in the precision of sums, and computes five
    matmuls, not two: grouped-query heads reduce K, but not these."""
    if way == "forward":
        return z.e * h.flops * z.n_kv / (2 * z.n * h.link / h.sharing)
    w = max(z.e, 4)
    return (3 * z.e + w + w / z.head_dim) * h.flops / (10 * h.link / h.sharing)


Row = tuple[Sizes, float, float, int]  # sizes; seconds forward, and backward; peak bytes on the device


def recommend(z: Sizes, h: Hardware, memory: float, slots: int = 2) -> tuple[Sizes | None, list[Row]]:
    """The fastest power-of-two number of chunks, forward and backward, that fits in `memory` bytes; and all
    rows. Within 1 % of the fastest, fewer bytes win."""
    rows: list[Row] = []
    u = 1
    while z.S % (u * z.P) == 0 and z.S // u >= 64 * z.P:
        now = z.with_chunks(u)
        peak = max(attention_peak(now, way, slots) for way in ("forward", "backward"))
        rows.append((now, *(attention_seconds(now, h, way, slots)[0] for way in ("forward", "backward")), peak))
        u *= 2
    fitting = [row for row in rows if row[3] <= memory]
    if not fitting:
        return None, rows
    fastest = min(forward + backward for _, forward, backward, _ in fitting)
    return [row for row in fitting if row[1] + row[2] <= 1.01 * fastest][-1][0], rows


# --------------------------------------------------------------------------------------------------------------- demo

NUMBERS = {
    "seq": (int, 524288, "tokens"),
    "ranks": (int, 1, "GPUs that share the sequence, by all-to-alls"),
    "heads": (int, 32, "of queries"),
    "kv-heads": (int, 8, "of keys and values"),
    "head-dim": (int, 64, "numbers in a head"),
    "memory-gb": (float, 2.0, "of the device, for attention"),
    "tflops": (float, 400.0, "that attention reaches"),
    "link-gb": (float, 50.0, "GB/s between host and device, each way"),
    "sharing": (int, 1, "GPUs that share this link"),
    "network-gb": (float, 200.0, "GB/s that leave a GPU in an all-to-all"),
    "slots": (int, 2, "for what comes from the host: 1 or 2"),
}


def main() -> int:
    parser = OneLineParser(description="How long chunks take, and how large they should be.", allow_abbrev=False)
    for name, (kind, default, text) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{text}; default %(default)s")
    parser.add_argument("--timeline", action="store_true", help="draw the streams of 4 chunks, forward and backward")
    args = parser.parse_args()
    for name in NUMBERS:
        value = getattr(args, name.replace("-", "_"))
        if not 1e-6 <= value <= 1e12:  # also for NaN; beyond, seconds are infinite or 0
            parser.error(f"--{name} {value} must be a number from 1e-6 to 1e12")
    if args.heads % args.kv_heads:
        parser.error(f"--kv-heads {args.kv_heads} does not divide --heads {args.heads}; use a divisor of it")
    if args.heads % args.ranks:
        parser.error(f"--ranks {args.ranks} does not divide --heads {args.heads}; use a divisor of it")
    if args.slots > 2:
        parser.error(f"--slots {args.slots}: dq of the last rows would not be home yet; use 1 or 2")
    least = 64 * args.ranks  # the smallest chunk considered
    if args.seq % (4 * args.ranks) or args.seq < least:
        parser.error(f"--seq {args.seq} on {args.ranks} ranks; use a multiple of {4 * args.ranks}, {least} or more")
    z = Sizes(args.seq, args.ranks, 1, args.heads, args.kv_heads, args.head_dim)
    h = Hardware(args.tflops * 1e12, args.link_gb * 1e9, sharing=args.sharing, network=args.network_gb * 1e9)
    best, rows = recommend(z, h, args.memory_gb * 1e9, args.slots)
    if best is None:
        least = math.ceil(min((row[3] for row in rows), default=0) / 1e6) / 1e3
        parser.error(f"--memory-gb {args.memory_gb} is too little for {args.seq} tokens; use {least:g} or more")
    if os.environ.get("RANK", "0") != "0":  # one rank suffices
        return 0
    wrong = []
    for u in (1, 2, 4, 8):
        now = z.with_chunks(u)
        for way in ("forward", "backward") if args.seq % (u * args.ranks) == 0 else ():
            said = attention_seconds(now, h, way, args.slots)[1]
            played = idle_time(schedule(now, way, args.slots), lambda op, now=now: seconds_of(op, now, h))
            if not abs(said - played) <= 1e-9 * (1 + played):
                wrong.append(f"{way} in {u} chunks waits {said} s by the sums and {played} s when it is played")
    if args.timeline:
        for way in ("forward", "backward"):
            print(f"{way}, 4 chunks of {z.with_chunks(4).c:,} tokens: # attention, x all-to-all, < > copies, . nothing")
            print("\n".join(drawn(timeline(z.with_chunks(4), h, way, args.slots))))
    else:
        shared = f" shared by {h.sharing}" if h.sharing > 1 else ""
        heads = f"{z.heads}/{z.kv_heads} heads of {z.head_dim}"
        print(f"{args.seq:,} tokens on {z.P} GPU(s), {heads}, bf16; {args.slots} slot(s)")
        print(f"attention of one layer at {args.tflops:g} TFLOP/s, over a link of {args.link_gb:g} GB/s{shared}")
        print(
            "".join(
                f"{title:>13}"
                for title in ("chunks", "tokens", "forward, s", "idle", "backward, s", "idle", "peak, GB")
            )
        )
        for now, *seconds, peak in rows:
            idle = [attention_seconds(now, h, way, args.slots)[1] for way in ("forward", "backward")]
            cells = "".join(f"{s:13.4g}{w / (s - w):13.1%}" for s, w in zip(seconds, idle, strict=True))
            print(f"{now.u:13,}{now.c:13,}{cells}{peak / 1e9:13.3g}{'  <- recommended' if now == best else ''}")
        hidden = [smallest_hidden_chunk(z, h, way) for way in ("forward", "backward")]
        print(f"fetches hide behind their pairs from {hidden[0]:,.0f} tokens on, and in backward from {hidden[1]:,.0f}")
    print(f"FAIL: {'; '.join(wrong)}" if wrong else "PASS")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
