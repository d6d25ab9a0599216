"""flash_attention.py: bytes that its tiles move, beside dense attention and the kernels in depth.

    python 09_kernels/bench_flash_attention.py             no GPU: verify, count, write results and figures
    python 09_kernels/bench_flash_attention.py --gpu       on a GPU: verify, time; [--out DIR] for the result
    python 09_kernels/bench_flash_attention.py --figures   only draw

Without a GPU nothing is timed: Triton's interpreter says nothing about speed. But it executes load by load, so the
bytes that kernels move, the tiles that they load and the order of both are counted and not computed. --gpu --dry --out
DIR does the same as --gpu in the interpreter, without results.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "in_depth"))

import flash_attention as script
import torch
import torch.nn.functional as F
from _bench_options import bench_options
from _flash_launch import Tiles
from _flash_verify import Yardstick, poisoned
from bench_fused import Traffic
from flash_kernels import Plan, flash_attention, triton_backward, triton_forward
from harness import predictions
from harness.ceilings import Table, paired_seconds, quotient
from harness.figures import COLOURS, GREY, write_figure
from harness.meter import saved_activations
from harness.report import ratio_of, write_result
from torch import Tensor

INTERPRETED = script.INTERPRETED.value
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
S, N, N_KV, D = 256, 2, 1, 32


def inputs(S: int, dtype: torch.dtype, N: int = N, N_kv: int = N_KV, D: int = D, B: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(S)
    return [torch.randn(B, S, n, D, generator=generator).to(DEVICE, dtype) for n in (N, N_kv, N_kv, N)]


def verify() -> None:
    """Ends the program unless out, dq, dk and dv are dense attention's: in float64, and with 16 bits as exactly."""
    for dtype in (torch.float64, torch.float16 if INTERPRETED else torch.bfloat16):
        for causal in (True, False):
            given = inputs(77, dtype)
            want, _ = script.run_attention(script.dense_attention, *(x.double() for x in given), causal=causal)
            dense, _ = script.run_attention(script.dense_attention, *given, causal=causal)
            got, _ = script.run_attention(script.flash_attention, *given, causal=causal)
            for name, x, y, z in zip(("out", "dq", "dk", "dv"), got, want, dense, strict=True):
                error, own = (((a.double() - y).norm() / y.norm()).item() for a in (x, z))
                if not error <= (1e-10 if dtype == torch.float64 else 1.5 * own):
                    sys.exit(f"{name}, causal {causal}, {dtype}: off by {error:.1e}, dense attention by {own:.1e}")


# ----------------------------------------------------------------------------------------------------------- bytes


def dense_bytes(given: list[Tensor]) -> list[int]:
    q, k, v = (x.detach().requires_grad_() for x in given[:3])
    with Traffic() as forward, saved_activations() as saved:
        out = script.dense_attention(q, k, v)
    with Traffic() as backward:
        torch.autograd.grad(out, (q, k, v), given[3])
    return [forward.bytes, backward.bytes, saved.bytes]


@contextmanager
def additions() -> Iterator[list[int]]:
    """[bytes that kernels add to what is in memory]. An addition is one move, as a store is."""
    machine, count = script.triton.runtime.interpreter.interpreter_builder, [0]
    plain = machine.create_atomic_rmw

    def counted(kind, address, value, mask, *rest):
        count[0] += int(mask.data.sum()) * address.get_element_ty().primitive_bitwidth // 8
        return plain(kind, address, value, mask, *rest)

    machine.create_atomic_rmw = counted
    try:
        yield count
    finally:
        del machine.create_atomic_rmw


def depth_bytes(given: list[Tensor], R: int, C: int, repeatable: bool) -> list[int]:
    """Of the kernels in depth with the same tiles and without tensor descriptors: with a kernel of its own for dq, or
    with dq added to by the programs of dk and dv."""
    q, k, v, dout = given
    plan = Plan(Tiles(R, C), Tiles(R, C), Tiles(R, C), tma=False)
    with script.count_traffic() as forward:
        out, lse = triton_forward(q, k, v, causal=True, dtype=q.dtype, plan=plan)
    with script.count_traffic() as backward, additions() as added:
        triton_backward(dout, q, k, v, out, lse, causal=True, dtype=q.dtype, plan=plan, repeatable=repeatable)
    zeros = 0 if repeatable else q.nbytes  # in fp32, so that the sum needs no rounding in the end
    return [forward[0], backward[0] + added[0] + zeros, sum(x.nbytes for x in (q, k, v, out, lse))]


def count() -> None:
    given = inputs(S, torch.float32)
    whole = dense_bytes(given)
    rows = [["dense, operation by operation", *whole, 1, 1, 1]]
    for R, C in ((16, 16), (32, 32), (64, 64), (128, 64)):
        _, found = script.run_attention(script.flash_attention, *given, causal=True, blocks=(R, C))
        formula = list(script.bytes_moved(*given[:2], True, R, C))
        if found[:2] != formula:
            sys.exit(f"tiles of {R} x {C} move {found[:2]} bytes, the formula says {formula}")
        rows.append([f"tiles of {R} x {C}", *found, *(x / y for x, y in zip(found, whole, strict=True))])
    for name, repeatable in (("seven matmuls", True), ("five matmuls", False)):
        found = depth_bytes(given, 64, 64, repeatable)
        rows.append([f"in_depth, 64 x 64, {name}", *found, *(x / y for x, y in zip(found, whole, strict=True))])
    write_result(
        "09_ground_flash",
        f"Bytes of causal attention, {S} tokens, {N} heads of {D} that share one of K/V, float32: counted",
        [
            "version",
            "forward moves",
            "backward moves",
            "saves",
            "forward, of dense",
            "backward, of dense",
            "saves, of dense",
        ],
        [[round(x, 3) if isinstance(x, float) else x for x in row] for row in rows],
        "Tiles: every load and store of the interpreter, equal to the formula. Dense: inputs and outputs of "
        "every operation. Five matmuls: with dq's zeros and all that is added to it. No cache is counted.",
    )


# ------------------------------------------------------------------------------------- which tiles, and in which order


@contextmanager
def watched() -> Iterator[list]:
    """[program, what, address, bytes or FLOPs] of every load, store and product, in order."""
    machine, seen = script.triton.runtime.interpreter.interpreter_builder, []
    plain = {name: getattr(machine, name) for name in ("create_masked_load", "create_masked_store", "create_dot")}

    def moved(what: str, mask_at: int, *args):
        each = args[0].get_element_ty().primitive_bitwidth // 8
        seen.append([machine.grid_idx[0], what, int(args[0].data.min()), int(args[mask_at].data.sum()) * each])
        return plain[f"create_masked_{what}"](*args)

    def product(a, b, *rest):
        seen.append([machine.grid_idx[0], "product", 0, 2 * a.data.size * b.data.shape[1]])
        return plain["create_dot"](a, b, *rest)

    machine.create_masked_load, machine.create_masked_store = partial(moved, "load", 1), partial(moved, "store", 2)
    machine.create_dot = product
    try:
        yield seen
    finally:
        for name, function in plain.items():
            setattr(machine, name, function)


WALK_S, WALK = 100, (32, 16)  # tokens of one head, and a tile


def walks() -> tuple[list[list], list[list]]:
    """Rows of the two results that the figures are drawn from: the tiles of each program, and what one program does."""
    given, (R, C) = inputs(WALK_S, torch.float32, 1, 1), WALK
    q, k, v, dout = (x.detach().requires_grad_() for x in given)
    with watched() as forward:
        out = script.flash_attention(q, k, v, blocks=WALK)
    with watched() as backward:
        torch.autograd.grad(out, (q, k, v), dout)
    programs = -(-WALK_S // R), -(-WALK_S // C)
    # dq's programs come first, and then programs begin at 0 again with those of dk, dv.
    again = max(at for at, event in enumerate(backward) if event[0] == programs[0] - 1 and event[1] == "store") + 1
    if programs[1] > programs[0]:
        again = next(at for at in range(1, len(backward)) if backward[at][0] < backward[at - 1][0])
    rows = []
    for kernel, events, own, other, first, every in (
        ("out", forward, R, C, 1, 2),  # loads of a program: q, then k and v of each tile
        ("dk, dv", backward[again:], C, R, 2, 4),  # k and v, then q, dout, LSE and delta of each tile
    ):
        loads = [[e for e in events if e[0] == p and e[1] == "load"] for p in range(-(-WALK_S // own))]
        base = min(x[2] for of_one in loads for x in of_one[first::every])
        for p, of_one in enumerate(loads):
            for step, event in enumerate(of_one[first::every]):
                mine, met = p * own, (event[2] - base) // (D * 4)
                rows.append([kernel, mine, min(own, WALK_S - mine), met, min(other, WALK_S - met), step + 1])
    tiles = sum(min(WALK_S, i + R) > j for i in range(0, WALK_S, R) for j in range(0, WALK_S, C))
    if [sum(row[0] == kernel for row in rows) for kernel in ("out", "dk, dv")] != [tiles, tiles]:
        sys.exit(f"the programs do not meet {tiles} tiles each way: {rows}")
    last = [event for event in forward if event[0] == programs[0] - 2]  # the last one that has R queries
    names = iter(["q", *["k", "v"] * len(last), ""])
    timeline = []
    for _, what, _, amount in last:
        name = next(names) if what == "load" else what
        timeline.append(
            [len(timeline) + 1, name, amount if what != "product" else 0, amount if what == "product" else 0]
        )
    timeline[-2][1], timeline[-1][1] = "out", "LSE"
    return rows, timeline


def draw_tiles(axes, result):
    rows = [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]
    for panel, kernel in zip(axes, ("out", "dk, dv"), strict=True):
        mine = [row for row in rows if row["of"] == kernel]
        S = max(row["from token"] + row["tokens"] for row in mine)
        panel.barh(S / 2, S, height=S, color=COLOURS["idle"], alpha=0.2)
        for row in mine:
            i, j, high, wide = row["from token"], row["meets"], row["tokens"], row["tokens of it"]
            if kernel == "dk, dv":
                i, j, high, wide = j, i, wide, high
            whole = j + wide - 1 <= i
            panel.barh(
                i + high / 2,
                wide,
                left=j,
                height=high,
                color=COLOURS["compute"],
                alpha=1 if whole else 0.65,
                edgecolor=GREY,
            )
            panel.text(
                j + wide / 2, i + high / 2, str(row["step"]), ha="center", va="center", color="black", fontsize=9
            )
        panel.set(xlabel="keys", ylabel="queries", xlim=(0, S), ylim=(S, 0))
        panel.grid(False)
        panel.set_title(
            "out and dq: one program per row" if kernel == "out" else "dk and dv: one program per column", fontsize=10
        )


def draw_traffic(axes, bytes_, timeline):
    left, right = axes
    rows = bytes_["rows"][:5]
    for y, row in enumerate(rows):
        label = ("forward", "backward") if y == 0 else (None, None)
        left.barh(y, row[1] / 2**20, color=COLOURS["activations"], height=0.6, label=label[0])
        left.barh(y, row[2] / 2**20, left=row[1] / 2**20, color=COLOURS["gradients"], height=0.6, label=label[1])
    names = ["dense" if "dense" in row[0] else row[0] for row in rows]
    left.set(yticks=range(len(rows)), yticklabels=names, xlabel="MiB read and written")
    left.invert_yaxis()
    left.legend(fontsize=9)
    steps = [dict(zip(timeline["columns"], row, strict=True)) for row in timeline["rows"]]
    products = [row for row in steps if row["FLOPs"]]
    for row in steps:
        right.bar(row["step"], row["bytes"] / 1024, width=0.85, color=COLOURS["messages"])
        name = "" if row["FLOPs"] else row["what"]
        right.text(row["step"], row["bytes"] / 1024 + 0.1, name, ha="center", fontsize=9)
    label = f"a matmul on the chip, {products[0]['FLOPs']:,} FLOPs"
    right.bar([row["step"] for row in products], -0.8, width=0.85, color=COLOURS["compute"], label=label)
    right.set(ylabel="KiB to and from HBM", ylim=(-1, 6), yticks=range(5))
    right.set(xlabel="events in the program of queries 64 to 95, in order")
    right.legend(fontsize=9, loc="upper center")
    right.grid(False)


def figures() -> None:
    folder = "09_kernels/figures"
    write_figure(f"{folder}/flash_tiles.svg", ["09_ground_flash_walk"], draw_tiles, shape=(1, 2), size=(8, 4))
    sources = ["09_ground_flash", "09_ground_flash_program"]
    write_figure(f"{folder}/flash_traffic.svg", sources, draw_traffic, shape=(1, 2), size=(9, 3.6))


def write_walks() -> None:
    walk, timeline = walks()
    R, C = WALK
    write_result(
        "09_ground_flash_walk",
        f"Which tiles the programs of a causal head of {WALK_S} tokens meet, and in which order; tiles of {R} x {C}",
        ["of", "from token", "tokens", "meets", "tokens of it", "step"],
        walk,
        "Read from the addresses that flash_attention.py loads in Triton's interpreter.",
    )
    write_result(
        "09_ground_flash_program",
        f"The program of queries {(WALK_S // R - 1) * R} to {WALK_S // R * R - 1}; tiles of {R} x {C}, float32",
        ["step", "what", "bytes", "FLOPs"],
        timeline,
        "Forward, causal, one head of 32; recorded in Triton's interpreter.",
    )


# ------------------------------------------------------------------------------------------------------------ on a GPU


# Sequences, tokens, heads, head dimension, causal. First the shape for which the depth has its goal.
SHAPES = ((2, 8192, 16, 128, True), (2, 8192, 16, 64, True), (2, 8192, 16, 64, False), (2, 2048, 16, 64, True))


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def failures(given: list[Tensor], causal: bool) -> list[str]:
    """What is wrong with out, dq, dk or dv of these inputs, which are those that are timed."""
    q, k, v = (x.detach().requires_grad_() for x in given[:3])
    with poisoned():
        out = script.flash_attention(q, k, v, causal=causal)
        gradients = torch.autograd.grad(out, (q, k, v), given[3])
    return Yardstick(given, causal).failures([out.detach(), *gradients])


def time_on_gpu(folder: Path | None) -> None:
    """Forward and backward beside PyTorch's own attention, the kernels in depth and the prediction."""
    gpu, dtype = predictions.here(), torch.float16 if INTERPRETED else torch.bfloat16
    table = Table(
        "09_ground_flash_gpu",
        f"flash_attention.py, {str(dtype)[6:]}, timed",
        ["pass", "shape", "ms", "times as fast as PyTorch's own", "times as fast as in_depth", *predictions.COLUMNS],
        "Median of 20 calls with a cold L2 cache, in turns, through autograd; each shape verified before. PyTorch's "
        "own: the kernel that its scaled_dot_product_attention chooses. Predicted from the SASS "
        "(tests/harness/predictions.py).",
        folder,
    )
    wrong = []
    for B, length, heads, D, causal in ((1, 40, 2, 32, True),) if INTERPRETED else SHAPES:
        given = inputs(length, dtype, heads, heads, D, B)
        shape = f"{B} x {length} tokens, {heads} heads of {D}, {'causal' if causal else 'full'}"
        if lines := failures(given, causal):
            wrong.append(f"{shape}: {lines[0]}")
            table.add("both", shape, f"wrong: {lines[0]}", "n/a", "n/a", *predictions.cells(None, 0.0))
            continue
        forward, backward = {}, {}
        for name, attention in {"mine": script.flash_attention, "sdpa": sdpa, "depth": flash_attention}.items():
            q, k, v = (x.detach().requires_grad_() for x in given[:3])
            forward[name] = partial(attention, q, k, v, causal=causal)
            out = forward[name]()
            backward[name] = partial(torch.autograd.grad, out, (q, k, v), given[3], retain_graph=True)
        for which, kernels, calls in (("forward", ["forward"], forward), ("backward", ["dq", "dkdv"], backward)):
            times = paired_seconds(torch.device(DEVICE), calls, 2 if INTERPRETED else 20)
            mine = ratio_of(times["mine"])
            fast = [quotient(times[other], times["mine"]) for other in ("sdpa", "depth")]
            parts = [predictions.attention(gpu, f"ground {x}", B, length, heads, D, causal) for x in kernels]
            cells = predictions.cells(None if None in parts else sum(parts), mine.median)
            table.add(which, shape, ratio_of([1e3 * x for x in times["mine"]]), *fast, *cells)
    if wrong:
        sys.exit("bench_flash_attention.py: " + "; ".join(wrong))


def main() -> None:
    about = "Verify flash_attention.py, count, draw; or time."
    options = bench_options(about, "--gpu", "--dry", "--out", "--figures", triton=True)
    if not options.gpu and not options.figures and not INTERPRETED:
        sys.exit("bench_flash_attention.py: loads are counted in Triton's interpreter: TRITON_INTERPRET=1, or --gpu")
    if options.figures:
        figures()
        return
    verify()
    if options.gpu:
        time_on_gpu(options.out)
        return
    count()
    write_walks()
    figures()


if __name__ == "__main__":
    main()
