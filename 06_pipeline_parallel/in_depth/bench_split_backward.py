"""The cost of a backward in two parts: operations, seconds, saved bytes of F, B, W, next to one backward, BW.

    python 06_pipeline_parallel/in_depth/bench_split_backward.py                            on a CPU: ratios
    python 06_pipeline_parallel/in_depth/bench_split_backward.py --gpu [--out DIR]   on one GPU: milliseconds and MiB
    python bench_split_backward.py --gpu --dry --out DIR   the same program on the CPU, tiny

First both parts together have to give the gradients of one backward, and W must take only the operations of
the gradients of the linear weights. Only then is anything timed. The stage is a few decoder blocks, as they
are and with each block recomputed. The milliseconds are the times for `schedules.py --schedule auto --times`.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from _pipeline_model import Block, Sizes
from harness import predictions
from harness.ceilings import device_here
from harness.meter import peak_memory
from harness.report import ratio_of, write_result
from split_backward import backward_for_input, recomputed_once
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

PARTS = ("F", "B", "W", "BW")
WAYS = ("kept", "recomputed")


class Operations(TorchDispatchMode):
    """Floating-point operations of matmuls and attention kernels, by torch's formulas.

    (torch's FlopCounterMode puts hooks on modules, which fail for a block that runs again in its backward.)
    """

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.total += count(*args, **(kwargs or {}), out_val=result)
        return result


class Blocks(nn.Module):
    """A stage: [1, S, H] -> [1, S, H]. `way`: what autograd saves of a block, all it needs or its input."""

    def __init__(self, hidden: int, layers: int, length: int, device: torch.device, dtype: torch.dtype):
        super().__init__()
        sizes = Sizes(hidden=hidden, heads=max(2, hidden // 128))
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(layers)).to(device, dtype)
        self.positions = torch.arange(length, device=device)
        self.way = WAYS[0]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = (block if self.way == "kept" else recomputed_once(block))(x, self.positions)
        return x


class Bench:
    """One stage, its input, and the gradient of its output."""

    def __init__(self, hidden: int, layers: int, length: int, device: torch.device, dtype: torch.dtype):
        torch.manual_seed(0)
        self.module, self.cuda = Blocks(hidden, layers, length, device, dtype), device.type == "cuda"
        self.x = torch.randn(1, length, hidden, device=device, dtype=dtype, requires_grad=True)
        self.grad = torch.randn_like(self.x)
        self.of_weights = layers * 2 * length * 12 * hidden**2  # of qkv, out, up, down: 3 + 1 + 4 + 4 matmuls
        for p in [self.x, *self.module.parameters()]:
            p.grad = torch.zeros_like(p)  # allocated now, so that no part is charged for it

    def split(self, do: Callable[[str, Callable], object]) -> list[Tensor]:
        """Run F, B, W through `do(part, call)`, which returns call's result. Returns the gradients, x first.

        F returns the edge of y in the graph but not its data, as the executor does after sending them.
        """
        self.module.zero_grad(set_to_none=False)
        output = [do("F", lambda: get_gradient_edge(self.module(self.x)))]
        (dx,), part = do("B", lambda: backward_for_input(output.pop(), self.grad, [get_gradient_edge(self.x)]))
        do("W", part.run)
        return [dx, *(p.grad for p in self.module.parameters())]

    def whole(self, do: Callable[[str, Callable], object]) -> list[Tensor]:
        self.module.zero_grad(set_to_none=False)
        self.x.grad.zero_()
        output = [get_gradient_edge(self.module(self.x))]
        do("BW", lambda: torch.autograd.backward([output.pop()], [self.grad]))
        return [self.x.grad, *(p.grad for p in self.module.parameters())]

    def verify(self, tolerance: float) -> dict[str, int]:
        """Exit unless both parts together equal one backward. Returns the operations of every part."""
        operations: dict[str, int] = {}

        def counted(part: str, call: Callable) -> object:
            with Operations() as counter:
                result = call()
            operations[part] = counter.total
            return result

        got = [tensor.clone() for tensor in self.split(counted)]
        names = ["the input", *(name for name, _ in self.module.named_parameters())]
        for name, a, b in zip(names, got, self.whole(counted), strict=True):
            error = ((a - b).abs().max() / b.abs().max()).item()
            if not error <= tolerance:
                sys.exit(f"gradient of {name}: both parts together differ from one backward by {error:.1e}")
        if operations["W"] != self.of_weights or operations["B"] + operations["W"] != operations["BW"]:
            sys.exit(f"operations {operations}: W should take {self.of_weights}, and B and W together as many as BW")
        return operations

    def kept(self) -> dict[str, int]:
        """Bytes still allocated after each part, besides weights, gradients, x and dx."""
        found: dict[str, int] = {}
        dx = self.x.nbytes
        with peak_memory() as memory:

            def measured(part: str, call: Callable) -> object:
                result = call()
                now = torch.cuda.memory_allocated() - before if self.cuda else memory.current
                found[part] = now - (dx if part in "BW" else 0)
                return result

            before = torch.cuda.memory_allocated() if self.cuda else 0
            self.split(measured)
        return found

    def seconds(self, repeats: int) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {part: [] for part in PARTS}

        def sync() -> None:
            if self.cuda:
                torch.cuda.synchronize()

        def timed(part: str, call: Callable) -> object:
            sync()
            start = time.perf_counter()
            result = call()
            sync()
            found[part].append(time.perf_counter() - start)
            return result

        for repeat in range(repeats + 2):
            for step in (self.split, self.whole) if repeat % 2 else (self.whole, self.split):
                step(timed)
        return {part: times[2:] for part, times in found.items()}


def rows_of(bench: Bench, way: str, operations: dict[str, int], repeats: int) -> list[list]:
    kept, seconds = bench.kept(), bench.seconds(repeats)
    seconds["B + W"] = [b + w for b, w in zip(seconds["B"], seconds["W"], strict=True)]
    operations["B + W"] = operations["B"] + operations["W"]
    rows = []
    for part in (*PARTS[:3], "B + W", "BW"):
        per_f, per_bw = (
            ratio_of([a / b for a, b in zip(seconds[part], seconds[other], strict=True)]) for other in ("F", "BW")
        )
        row = [way, part, round(operations[part] / operations["F"], 3)]
        row += [round(1e3 * statistics.median(seconds[part]), 3)] if bench.cuda else []
        row += [1 if part == "F" else per_f, 1 if part == "BW" else per_bw]
        stays = round(kept[part] / bench.x.nbytes, 2) if part in kept else "-"
        row += [stays, round(kept[part] / 2**20, 1) if part in kept else "-"] if bench.cuda else [stays]
        if bench.cuda:
            expected = predictions.product(predictions.here(), operations[part])
            row += predictions.cells(expected, statistics.median(seconds[part]))
        rows.append(row)
    return rows


def measure(gpu: bool, dry: bool, out: Path | None) -> None:
    device = device_here() if gpu else torch.device("cpu")
    cuda, small = device.type == "cuda", dry or not gpu
    dtype, repeats = (torch.float32, 3 if dry else 15) if small else (torch.bfloat16, 30)
    hidden, layers, length = ((32, 2, 16) if dry else (256, 2, 256)) if small else (4096, 4, 4096)
    if not cuda:
        torch.set_num_threads(1)
    bench, operations = Bench(hidden, layers, length, device, dtype), {}
    for bench.module.way in WAYS:
        operations[bench.module.way] = bench.verify(1e-5 if small else 2e-2)  # bf16 has 8 bits
    columns = ["activations", "part", "operations, of F's", *(["milliseconds"] if cuda else []), "seconds, of F's"]
    columns += ["seconds, of BW's", "kept after it, in tensors of x's size"]
    columns += ["MiB kept", *predictions.COLUMNS] if cuda else []
    title = f"One stage of {layers} blocks, hidden {hidden}, {length} tokens, {str(dtype).removeprefix('torch.')}"
    notes = (
        "BW is one ordinary backward; B and W are its two parts, compared with it first. Medians, and quartiles. "
        + ("" if cuda else "Operations of matrix products; the core of attention is not counted on a CPU. ")
        + "Kept: besides weights, their gradients, x and its gradient."
        + (" Predicted: the operations at 80 % of the data sheet's rate." if cuda else "")
    )
    rows: list[list] = []
    for bench.module.way in WAYS:  # written after each
        rows += rows_of(bench, bench.module.way, operations[bench.module.way], repeats)
        write_result("06_split_backward", title, columns, rows, notes, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="measure on one GPU")
    parser.add_argument("--dry", action="store_true", help="with --gpu: on the CPU, tiny, to see that it runs")
    parser.add_argument("--out", type=Path, help="folder for the result; default results/")
    args = parser.parse_args()
    name = Path(__file__).name
    if args.dry and not (args.gpu and args.out):
        print(f"{name}: --dry measures nothing worth keeping; use --gpu --dry --out DIR", file=sys.stderr)
        sys.exit(2)
    if args.gpu and not args.dry and not torch.cuda.is_available():
        print(f"{name}: --gpu needs a GPU and there is none; use --gpu --dry --out DIR to try it", file=sys.stderr)
        sys.exit(2)
    measure(args.gpu, args.dry, args.out)


if __name__ == "__main__":
    main()
