"""The trainer's layouts on a GPU: the same three steps on one rank and on several, with the tensors on the device.

    python tests/gpu_layouts.py --share [--out DIR]      several ranks on one GPU, over gloo
    python tests/gpu_layouts.py [--out DIR]              one GPU for each rank, over nccl
    python tests/gpu_layouts.py [--share] --dry --out DIR     fewer layouts, on the CPU or a stand-in GPU (gpu.py --dry)

On the CPU the tests of the trainer show this in float64 for a hundred layouts. Here it is about what a CPU cannot show:
streams, kernels, and collectives of tensors that lie on a GPU. The model is small, in fp32 without TF32, and the
optimizer is plain SGD, which hides nothing: losses, gradient norms and weights of three steps are those of one rank.

nccl refuses two ranks on one GPU. gloo takes them, copying through the host, but sends no CUDA tensor from rank to
rank; so rings and pipelines are for nccl. A collective that gloo lacks leaves its layout out, and the table says so.
"""

import argparse
import contextlib
import io
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "11_5d_trainer"))

import paths  # noqa: F401  finds the chapters below
import torch
import torch.distributed as dist
import torch.distributed.nn  # first imported while a group is up, it would keep that group until the end
import torch.multiprocessing as mp
from full_state import full_state
from harness.reference import error_between
from harness.report import write_result
from llama import LlamaConfig
from options import Config
from step import make_trainer, train_step
from torch import Tensor

SIZES = LlamaConfig(vocab_size=256, hidden=128, layers=4, heads=4, kv_heads=2, intermediate=256)
SEQ, SAMPLES = 64, 8
TOLERANCE = 2e-5  # fp32, sums in another order, three steps

# name -> options. `sends`: from rank to rank, which gloo does not do with tensors on a GPU.
LAYOUTS: dict[str, dict[str, Any]] = {
    "data parallel": {},
    "ZeRO 1": {"zero": 1},
    "ZeRO 2": {"zero": 2},
    "ZeRO 3": {"zero": 3},
    "tensor parallel": {"tp": 2},
    "tensor + sequence parallel, ZeRO 1": {"tp": 2, "sequence_parallel": True, "zero": 1},
    "Ulysses": {"cp": 2, "cp_kind": "ulysses"},
    "all-gather attention": {"cp": 2, "cp_kind": "allgather"},
    "8 experts on 2 ranks": {"experts": 8, "ep": 2, "balance": 0.0},
    "zigzag ring": {"cp": 2, "cp_kind": "zigzag", "sends": True},
    "pipeline 1F1B": {"pp": 2, "sends": True},
    "pipeline ZB-H1, ZeRO 1": {"pp": 2, "schedule": "zb-h1", "zero": 1, "sends": True},
}
DRY = ("data parallel", "ZeRO 2", "tensor parallel", "pipeline 1F1B")


def plain_sgd(model: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": list(model.parameters()), "weight_decay": 0.0}], lr=0.1)


def three_steps(options: dict[str, Any], device: torch.device, world: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradient norms of three steps, and the whole model's weights after them. Collective."""
    config = Config(seq_len=SEQ, global_batch=SAMPLES, micro_batch=1, kernels="torch", clip=0.0, **options)
    config.check()
    config.check_layout(SIZES, world)
    me = make_trainer(config, SIZES, device, plain_sgd)
    dp, place = me.mesh.sizes["dp"], me.mesh.place["dp"]
    generator, numbers = torch.Generator().manual_seed(0), []
    for _ in range(3):
        tokens = torch.randint(SIZES.vocab_size, (SAMPLES, SEQ + 1), generator=generator)
        mine = tokens.view(dp, SAMPLES // dp, 1, SEQ + 1)[place].to(device)
        numbers += train_step(me, [(t[:, :-1], t[:, 1:]) for t in mine])
    return numbers, full_state(me.owners, me.model, me.mesh)["weights"]


def difference(options: dict[str, Any], device: torch.device, want: tuple) -> str:
    """Run one layout; what it is off by at most, or why it could not run. The same on every rank."""
    options = {name: value for name, value in options.items() if name != "sends"}
    mine: tuple[float, str] = (0.0, "")
    try:
        numbers, weights = three_steps(options, device, dist.get_world_size())
        errors = [error_between(torch.tensor(numbers), torch.tensor(want[0]))]
        errors += [error_between(weights[name], expected) for name, expected in want[1].items()]
        mine = (max(errors, key=lambda e: (e != e, e)), "")  # a NaN is the worst
    except Exception as error:  # also what gloo cannot do; the layouts after it go on
        mine = (float("nan"), f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:100]}")
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    why = "; ".join(sorted({reason for _, reason in everyone if reason}))
    return f"not run ({why})" if why else f"{max((error for error, _ in everyone), key=lambda e: (e != e, e)):.1e}"


def write(found: dict[str, str], world: int, share: bool, out: Path | None) -> list[str]:
    """The result of the layouts so far; those that are wrong. What could not run is wrong where everything has to."""
    gpus = torch.cuda.device_count()
    wrong = []
    for name, error in found.items():
        excused = share and gpus and error.startswith(("not run", "left out")) and name != "data parallel"
        if not excused and not (error[:1].isdigit() and float(error) <= TOLERANCE):
            wrong.append(f"{name}: {error}")
    how = "gloo, all on one device" if share or not gpus else "nccl, a GPU each"
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the whole table
        write_result(
            "11_layouts_shared_gpu" if share else "11_layouts_gpus",
            f"The trainer on {world} ranks against one rank: three steps of plain SGD, fp32",
            ["layout", "largest relative difference"],
            [[name, error] for name, error in found.items()],
            f"{how}. Losses, gradient norms and all weights; at most {TOLERANCE:g}. "
            f"{SIZES.layers} layers, hidden {SIZES.hidden}, {SAMPLES} samples of {SEQ} tokens.",
            folder=out,
            verified=not wrong,
        )
    return wrong


def rank_main(rank: int, world: int, share: bool, dry: bool, store: str, answer: str, out: Path | None) -> None:
    device = torch.device("cuda", 0 if share else rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_num_threads(1)
    backend = "gloo" if share or device.type == "cpu" else "nccl"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    file = dist.FileStore(store, world)
    limit = timedelta(seconds=60)
    # One rank on its own first, as every rank's reference: a world of one, which is left again.
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    names = DRY if dry else tuple(LAYOUTS)
    counts = {LAYOUTS[name].get("experts", 0) for name in names}
    want = {experts: three_steps({"experts": experts, "balance": 0.0}, device, 1) for experts in counts}
    dist.destroy_process_group()
    dist.init_process_group(backend, store=file, rank=rank, world_size=world, timeout=limit)
    found = {}
    for name in names:
        options = LAYOUTS[name]
        if options.get("sends") and share and device.type == "cuda":
            found[name] = "left out: gloo sends no CUDA tensors"
        else:
            found[name] = difference(options, device, want[options.get("experts", 0)])
        if rank == 0:  # at once: a layout that hangs shall not take the others with it
            print(f"{name}: {found[name]}", flush=True)
            wrong = write(found, world, share, out)
    if rank == 0:
        Path(answer).write_text("\n".join(wrong))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description="Hold the trainer's layouts on GPUs against one rank.")
    parser.add_argument("--share", action="store_true", help="all ranks on the first GPU, over gloo")
    parser.add_argument("--dry", action="store_true", help="fewer layouts, to try the program")
    parser.add_argument("--out", type=Path, help="folder for the result instead of results/")
    args = parser.parse_args()
    if args.dry and not args.out:
        print("gpu_layouts.py: --dry measures nothing worth keeping; add --out DIR", file=sys.stderr)
        return 2
    gpus = torch.cuda.device_count()
    if not args.dry and gpus < (1 if args.share else 2):
        need = "a GPU" if args.share else "two GPUs or more"
        print(f"gpu_layouts.py: PyTorch finds {gpus} GPU(s), and this needs {need}; try --dry", file=sys.stderr)
        return 2
    world = 2 if args.dry or gpus < 4 else 4
    if args.share and not args.dry:
        world = 4
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        answer = f"{folder}/answer"
        mp.spawn(rank_main, (world, args.share, args.dry, f"{folder}/store", answer, args.out), nprocs=world)
        wrong = Path(answer).read_text().splitlines()
    if wrong:
        print(f"gpu_layouts.py: {'; '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
