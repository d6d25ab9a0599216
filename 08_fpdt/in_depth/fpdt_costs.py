"""FPDT III: the costs of chunks. Bytes on the device, on the host and in flight, and idle time of a forward.

Problem. More chunks mean less memory, and more and smaller copies. Which number is best, known in advance?

Idea. Everything that FPDT does can be counted in advance. A rank has n = N/P query heads and n_kv key/value
heads; a chunk has c = S/u tokens, the batch is 1, an element has e bytes, an element of a sum w >= 4:

    Q = c n D e    one chunk of q̂, of the output or of its gradient        K = c n_kv D e   one chunk of k̂ or v̂
    Q_w, K_w       the same in fp32                                         L = c n w        its log-sum-exp

    device, forward     Q + 4K + 2 (Q_w + L) + a group's output             q̂, two slots of k̂ v̂, two outputs to merge
    device, backward    4K + 2 (3Q + L + Q_w) + 2K_w + Q + ...              two slots of everything, sums of dk̂ dv̂, dq_j
    link, forward       stored (u-1) 2K;  fetched u(u-1)/2 2K
    link, backward      stored uQ + r Q_w;  fetched 2uK + u(u+1)/2 (3Q + L) + r Q_w,  r = u(u-1)/2 - 1 (0 if u = 1)
    network             (2N + 2 lcm(N_kv, P)) S D e (P-1)/P²  forward, the same backward: chunks change nothing
The first two are multiples of c: they fall as 1/u, and if S and u double they stay.

Time. A pair of chunks takes t = 4 c² n D / (FLOP/s), the fetch of its keys and values f = 2 c n_kv D e / (bytes/s).
t grows with c², f with c: from  c* = e (FLOP/s) n_kv / (2 n (bytes/s))  on, the computation hides the fetch.
Below it, each row of chunks waits for its link; `idle_forward` gives the exact time. Backward, stores,
all-to-alls, a link shared by GPUs, and the chunk size that follows from all of this: fpdt_time.py.

    row i    | project, own chunk: a |  t  |idle|  t  |idle|  t  |     f > t: (f - t) per pair, minus what the
    fetch    |      f      |      f      |      f      |                head start in `a` and two slots hide

Source: FPDT 2408.16978, sections 3 to 5. The formulas are ours, tested with meters and a simulation.

Run it:
    python fpdt_costs.py --seq 2097152                          idle time, predicted and simulated; bytes by chunks
    python fpdt_costs.py --paper                                the paper's memory table, recomputed
The last line is PASS, or the script exits with 1 and says which number is wrong.
"""

import inspect
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from fpdt_store import Buffer, CpuMachine, OneLineParser, Op, Prefetch, Store

# --------------------------------------------------------------------------------------------------------------- sizes


@dataclass(frozen=True)
class Sizes:
    """One attention layer on P ranks, in u chunks; batch 1."""

    S: int
    P: int
    u: int
    heads: int
    kv_heads: int
    head_dim: int
    e: int = 2

    def with_chunks(self, u: int) -> "Sizes":
        return replace(self, u=u)

    @property
    def c(self) -> int:
        return self.S // self.u

    @property
    def n(self) -> int:
        return self.heads // self.P

    @property
    def n_kv(self) -> int:
        return math.lcm(self.kv_heads, self.P) // self.P

    def letters(self) -> tuple[int, int, int, int, int]:
        """Q, K, L, Q_w, K_w of the docstring, in bytes."""
        w = max(self.e, 4)
        Q = self.c * self.n * self.head_dim
        K = self.c * self.n_kv * self.head_dim
        return Q * self.e, K * self.e, self.c * self.n * w, Q * w, K * w


def attention_peak(z: Sizes, way: str, sets: int = 2) -> int:
    """Peak bytes on the device, "forward" or "backward", without inputs and outputs of all tokens; `sets` of
    slots, one or two.

    Counted phase by phase; the largest is the peak. `moved` is 1 if an all-to-all needs a second copy.
    """
    Q, K, L, Q_w, K_w = z.letters()
    G = z.n // z.n_kv
    moved = int(z.P > 1)
    u = z.u
    cast = int(Q_w != Q)
    if way == "forward":
        before = sets * 2 * K if u > 2 else 0  # slots that exist when a row begins
        slots = before if u != 2 else 2 * K
        one = Q_w + L + (Q + L) // G  # attention of a pair, and the kernel's own result for one group of heads
        # --- exercise 8.28: the phases of a row of the forward pass ---
        phases = [
            before + max(Q + moved * Q, Q + 2 * K + moved * K),  # all-to-all of q, k, v
            before + Q + 2 * K + one,  # attention of the chunk to itself
            slots + Q + Q_w + L + max(one, Q_w + 3 * L) if u > 1 else 0,  # to an earlier one; merging with two lse
            slots + Q + Q_w + L + cast * Q,  # back to the model's precision
            slots + 2 * Q + moved * Q,  # all-to-all of the output
        ]
        # --- end exercise ---
        return max(phases)
    slots = min(sets, u) * (2 * K + 3 * Q + L) + (sets * Q_w if u > 2 else 0)
    new_dq = Q_w if u < 3 else 0  # otherwise it is summed in its slot
    waiting = Q if u > 1 else 0  # dq_j, complete before dk_j and dv_j
    stays = Q_w if u == 2 else 0  # dq of the last row, which the next step needs again
    kernel = Q // G + 2 * K + (L // G if G > 1 else 0)
    phases = [
        slots + 2 * K_w + new_dq + waiting + kernel,
        slots + 2 * K_w + new_dq + Q + (moved + cast) * Q,
        slots + 2 * K_w + stays + Q + 2 * K + (moved + cast) * K,
    ]
    return max(phases)


def feed_forward_peak(t: int, H: int, F: int, e: int, way: str) -> int:
    """Peak bytes while t tokens run through norm, SwiGLU MLP and residual, without inputs, outputs and the
    sums of weight gradients. For F >= H, e >= 4 (else plus casts of the norm).

    forward     gate, silu(gate) and up, and one of [t, H]
    backward    these, their product and the gradients of two; three of [t, H], 1/rms; one weight's share of gradient
    """
    return t * e * (H + 3 * F) if way == "forward" else t * e * (6 * F + 3 * H + 1) + H * F * e


def loss_peak(t: int, T: int, H: int, V: int, e: int) -> int:
    """Peak bytes of `chunked_loss` for T tokens, t at a time: gradients of hidden states and weight, logits
    of t tokens, one share of the weight's gradient, per token a label, a bool and two numbers; the loss."""
    w = max(e, 4)
    logits = t * V * (w + (e if w != e else 0))
    return T * H * e + V * H * (w + e) + logits + t * (9 + 2 * w) + w


def link_bytes(z: Sizes, what: str) -> tuple[int, int]:
    """(device to host, host to device) of one layer's attention. `what`: "forward"; "forward, kept" if it
    stores q̂, k̂, v̂, the output and the log-sum-exp for backward; "backward"."""
    Q, K, L, Q_w, _ = z.letters()
    u = z.u
    earlier = u * (u - 1) // 2  # pairs of a chunk and an earlier one
    # --- exercise 8.29: bytes over the link ---
    if what == "forward":
        return (u - 1) * 2 * K, earlier * 2 * K
    if what == "forward, kept":
        return u * (2 * Q + 2 * K + L), earlier * 2 * K
    again = max(earlier - 1, 0)  # sums of dq̂ stored and fetched again; the last one stays
    return u * Q + again * Q_w, u * 2 * K + (earlier + u) * (3 * Q + L) + again * Q_w
    # --- end exercise ---


def host_peak(z: Sizes) -> int:
    """Peak bytes on the host for one layer: saved q̂ k̂ v̂ ô lse, the gradient of ô, and sums of dq̂."""
    Q, K, L, Q_w, _ = z.letters()
    return z.u * (3 * Q + 2 * K + L) + ((z.u - 1) * Q_w if z.u > 2 else 0)


def network_bytes(z: Sizes) -> int:
    """Bytes that a rank sends for one layer's attention, forward; backward sends as many. For any u."""
    heads = 2 * z.heads + 2 * math.lcm(z.kv_heads, z.P)
    return heads * z.S * z.head_dim * z.e * (z.P - 1) // z.P**2


def block_link_bytes(z: Sizes, H: int, keep: str) -> tuple[int, int]:
    """(device to host, host to device) of one block, forward and backward, on one rank."""
    x = z.S // z.P * H * z.e
    kept = link_bytes(z, "forward, kept")
    back = link_bytes(z, "backward")
    if keep == "attention":  # backward reads x twice, and ô again
        return kept[0] + back[0] + x, kept[1] + back[1] + 2 * x + z.u * z.letters()[0]
    once = link_bytes(z, "forward")
    return once[0] + kept[0] + back[0] + x, once[1] + kept[1] + back[1] + 2 * x


def model_host_peak(z: Sizes, H: int, layers: int, keep: str) -> int:
    """Peak bytes on the host, on one rank: x of every layer, and the rest of one layer, or of all."""
    x = z.S // z.P * H * z.e
    Q, K, L, _, _ = z.letters()
    kept = z.u * (2 * Q + 2 * K + L)  # of one layer
    return layers * x + host_peak(z) + (layers - 1) * (kept if keep == "attention" else 0)


# ---------------------------------------------------------------------------------------------------------------- time


def simulate(ops: Sequence[Op], seconds: Callable[[Op], float]) -> list[tuple[float, float]]:
    """Start and end of each operation, if each stream runs one at a time, in order, after its events."""
    ends: dict[str, list[float]] = {}
    times = []
    for op in ops:
        # --- exercise 8.30: when can it start? ---
        start = max((ends[stream][tick - 1] for stream, tick in op.after.items() if tick), default=0.0)
        # --- end exercise ---
        ends.setdefault(op.stream, []).append(start + seconds(op))
        times.append((start, ends[op.stream][-1]))
    return times


def idle_time(ops: Sequence[Op], seconds: Callable[[Op], float]) -> float:
    """The total time that the computation waits."""
    spans = [span for op, span in zip(ops, simulate(ops, seconds), strict=True) if op.stream == "compute"]
    return max(end for _, end in spans) - sum(end - start for start, end in spans)


def record_forward(u: int, sets: int = 2) -> list[Op]:
    """The operations of FPDT's forward pass without data: chunks of one element. A test compares them with
    fpdt_attention.py."""
    machine = CpuMachine(record=True)
    store = Store(machine)
    kv = [[torch.zeros(1), torch.zeros(1)] for _ in range(u)]
    hosts: list[list[Buffer]] = []
    pairs = [(i, j) for i in range(u) for j in range(i)]
    earlier = Prefetch(store, pairs, lambda ij: hosts[ij[1]], torch.device("cpu"), sets)
    for i in range(u):
        store.compute("project")
        if i < u - 1:
            hosts.append([store.offload(x) for x in kv[i]])
        store.compute("attend", 1)
        for _ in range(i):
            store.compute("attend", 2, reads=earlier.take())
            earlier.done()
        store.compute("finish")
        store.compute("to tokens")
    return machine.ops


def idle_forward(u: int, a: float, t: float, f: float) -> float:
    """Seconds that the computation waits in a forward pass.

    a   work per row: finish a row, project the next, attend to the chunk itself
    t   attend to one earlier chunk
    f   fetch the k̂ and v̂ of one chunk. Storing k̂ must take at most a, plus the chunk's attention to itself

    The first fetch is exposed: its slots are made at first use. Row i >= 2; T is the end of the row before.
    - The row's first fetch began with the last pair of the row before, and arrives at T + f - t. Without gaps
      the last of i arrives at T + i f - t. Without waiting its pair would begin at T + a + (i - 1) t: the
      row is late by i (f - t) - a.
    - But if `a` is long, both slots fill during it, and the third fetch must wait for the end of the first
      pair. From there the last pair is i - 2 fetches and as many pairs away: late by (i - 2) (f - t).
    """
    # --- exercise 8.31: the closed form ---
    rows = [max(0.0, (i - 2) * (f - t), i * (f - t) - a) for i in range(2, u)]
    return (f if u > 1 else 0.0) + sum(rows)
    # --- end exercise ---


# ---------------------------------------------------------------------------------------------------------- hardware


@dataclass(frozen=True)
class Hardware:
    """Achieved rates, not those of a data sheet: bench_fpdt_attention.py --gpu measures them."""

    flops: float = 400e12  # FLOP/s of attention, one GPU
    link: float = 50e9  # bytes/s between host and device, each way
    start: float = 20e-6  # seconds to start a kernel or a copy
    sharing: int = 1  # GPUs that use this link at the same time
    network: float = 200e9  # bytes/s that a GPU sends in an all-to-all

    def copy(self, size: float) -> float:
        """Seconds of a copy of `size` bytes, either way."""
        return size * self.sharing / self.link + self.start


def pair_seconds(z: Sizes, h: Hardware) -> tuple[float, float]:
    """(compute one pair of chunks, fetch its keys and values), forward."""
    t = 4 * z.c**2 * z.n * z.head_dim / h.flops + h.start
    return t, 2 * h.copy(z.letters()[1])


# ---------------------------------------------------------------------------------------------------- the paper's table


@dataclass(frozen=True)
class PaperRow:
    """A row of FPDT's report for two chunks (2408.16978): 27 GB become 18, and 61 become 45.

    Our assumptions, since a table of totals does not list the parts:
    - 256K tokens on each GPU, bf16, no grouped-query heads; hidden sizes 2560 and 4096 (GPTs of 2.7 and 6.7 billion).
    - Only the backward of attention is chunked, without slots: q, k, v, the output, its gradient, dq, dk
      and dv are 8 tensors of [tokens, hidden], and the all-to-alls of dq, dk and dv send from and receive into 6 more.
    - All else (weights, optimizer, residual stream, checkpoints) does not change with u: F. So M(u) = F + A/u, and the
      second column follows from the first.
    """

    model: str
    hidden: int
    one: float  # GB, not chunked
    two: float  # GB, two chunks


PAPER = (PaperRow("2.7B", 2560, 27, 18), PaperRow("6.7B", 4096, 61, 45))


def paper_table() -> list[tuple[str, float, float, float, float]]:
    """(model, GB at one chunk, at two as published, at two by the formula, tensors of [S, H] that would be exact)."""
    unit = 2 * 256 * 1024 / 1e9  # GB of one tensor [S, 1] in bf16
    rows = []
    for row in PAPER:
        A = 14 * unit * row.hidden
        rows.append((row.model, row.one, row.two, row.one - A / 2, 2 * (row.one - row.two) / (unit * row.hidden)))
    return rows


# --------------------------------------------------------------------------------------------------------------- demo


def main() -> int:
    parser = OneLineParser(description="What chunks cost: bytes, and idle time of a forward.", allow_abbrev=False)
    parser.add_argument("--seq", type=int, default=524288)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--paper", action="store_true", help="only the paper's memory table")
    args = parser.parse_args()
    for option in ("seq", "heads", "kv_heads", "head_dim"):
        value = getattr(args, option)
        name = f"--{option.replace('_', '-')}"
        if value < 1:
            parser.error(f"{name} {value} must be 1 or more")
        if args.paper and value != parser.get_default(option):
            parser.error(f"{name} {value} changes nothing in the paper's table; leave it out, or --paper")
    if args.heads % args.kv_heads:
        parser.error(f"--kv-heads {args.kv_heads} does not divide --heads {args.heads}; use a divisor of it")
    z = Sizes(args.seq, 1, 1, args.heads, args.kv_heads, args.head_dim)
    if os.environ.get("RANK", "0") != "0":  # one rank suffices
        return 0
    if args.paper:
        print(inspect.getdoc(PaperRow), end="\n\n")
        print(f"{'model':8}{'u = 1':>8}{'u = 2':>8}{'formula':>9}   tensors that would be exact")
        for model, one, two, formula, exact in paper_table():
            print(f"{model:8}{one:8.0f}{two:8.0f}{formula:9.1f}   {exact:.1f}")
        print("PASS")
        return 0
    wrong = []
    print("idle time of a forward pass of 8 chunks, in units of a pair of chunks; a row's own work takes 1.2")
    print(f"{'fetch':>8}{'closed form':>13}{'simulated':>11}")
    for f in (0.25, 0.75, 1.25, 2.0, 3.0):
        costs = {"project": 0.5, "finish": 0.2, "fetch": f / 2, "offload": f / 2}
        predicted = idle_forward(8, 1.2, 1.0, f)

        def seconds(op: Op, costs: dict[str, float] = costs) -> float:
            return costs.get(op.name, op.amount / 2)

        got = idle_time(record_forward(8), seconds)
        print(f"{f:8.2f}{predicted:13.2f}{got:11.2f}")
        if not abs(predicted - got) < 1e-9:
            wrong.append(f"idle time at fetch {f}: predicted {predicted}, simulated {got}")
    heads = f"{args.heads}/{args.kv_heads} heads of {args.head_dim}"
    print(f"\n{args.seq:,} tokens, {heads}, bf16; GB of one layer's attention")
    titles = ("chunks", "tokens", "device", "in backward", "on the host", "to the host", "to the device")
    print("".join(f"{title:>15}" for title in titles))
    for u in (2**n for n in range(11) if args.seq % 2**n == 0):
        now = z.with_chunks(u)
        ways = zip(link_bytes(now, "forward, kept"), link_bytes(now, "backward"), strict=True)
        sizes = (attention_peak(now, "forward"), attention_peak(now, "backward"), host_peak(now), *map(sum, ways))
        print(f"{u:15,}{now.c:15,}{''.join(f'{x / 1e9:15,.4g}' for x in sizes)}")
    print(f"FAIL: {'; '.join(wrong)}" if wrong else "PASS")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
