"""Does the model fit, and can it be computed as asked? Checked before any rank connects or allocates memory.

`check_memory` counts weights, gradients and AdamW's states of what a rank holds (chapter 01 has the
bytes of each, chapters 03 to 07 what a rank holds). Activations are not counted, so this is the least that a
rank needs: what it refuses cannot run, but what it accepts may still be too much. ZeRO-3 shards weights that
a rank has initialized, so all weights of its layers must also fit. `check_kernels` and `check_compile` know
what the fused kernels of chapter 09 and torch.compile can do.
"""

import os
import shutil
from pathlib import Path

import paths  # noqa: F401  finds the chapters below
import torch
from llama import LlamaConfig
from model import full_shapes, is_adapter
from ops import FP8, WEIGHTS
from options import Config, UsageError
from pipeline_executor import layers_of
from schedule_simulator import W
from step import has_bf16, has_triton, kernels_on
from zero_memory import bytes_per_parameter


def least_bytes(config: Config, sizes: LlamaConfig, world_size: int) -> dict[str, float]:
    """Bytes of weights, gradients and AdamW's states, on the rank that holds most."""
    bytes_each = WEIGHTS.get(config.precision, torch.float32).itemsize
    all_ranks = config.dp(world_size) * config.cp * (1 + config.mirrored(sizes, world_size))
    shards = config.zero_shards or all_ranks
    own_copy = config.precision == "bf16-master" or config.zero_offload
    moments = (2 + own_copy) * max(bytes_each, 4)
    summed = 4 if config.accumulate_dtype == "fp32" else bytes_each
    # Bytes per parameter: (states, weight, gradient), as chapter 03 divides them.
    kinds = {"weights": (0, bytes_each, 0), "gradients": (0, 0, summed), "AdamW's states": (moments, 0, 0)}
    if config.evaluate:  # without a step there is nothing else
        kinds = {"weights": kinds["weights"]}
    count = {kind: most_parameters(config, sizes, world_size, trained=kind != "weights") for kind in kinds}
    return {kind: count[kind] * bytes_per_parameter(config.zero, shards, *each) for kind, each in kinds.items()}


def most_parameters(config: Config, sizes: LlamaConfig, world_size: int, trained: bool = False) -> float:
    """On the rank with most, after all sharding but ZeRO's. `trained`: only adapters, if there are any."""
    schedule = config.pipeline(world_size, sizes.layers)
    held = [set(range(sizes.layers))]
    if schedule:
        held = [
            {layer for _, stage in schedule.stages_of(r) for layer in layers_of(stage, schedule.stages, sizes.layers)}
            for r in range(config.pp)
        ]
    elements = [0.0] * len(held)
    for name, tensor in full_shapes(sizes, config.mixture(sizes)).items():
        if trained and sizes.lora_rank and not is_adapter(name):
            continue
        parts = name.split(".")
        layer = 0 if "embed" in name else sizes.layers - 1
        if parts[1] == "layers":
            layer = int(parts[2])
        matrix = config.ep if "experts" in parts else config.tp  # tensor ranks have the same full experts
        share = matrix if tensor.dim() > 1 or name.endswith("bias") else 1
        for i, layers in enumerate(held):
            elements[i] += tensor.numel() / share if layer in layers else 0
    return max(elements)


def memory_of_a_rank(device: torch.device) -> int:
    """Bytes of its GPU, or its share of this machine's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        machine = min(machine, int(text))
    return machine // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def check_memory(config: Config, sizes: LlamaConfig, world_size: int, device: torch.device) -> None:
    """Raise UsageError, with the estimate, for a model that a rank cannot even hold."""
    need = least_bytes(config, sizes, world_size)
    advice = "share it out with --tp, --pp, --ep or --zero on more ranks, or take a smaller model"
    places = [(need, device, advice)]
    if config.zero_offload and device.type == "cuda":  # the GPU's memory, and the machine's for the rest
        places = [({"weights": need.pop("weights")}, device, advice), (need, torch.device("cpu"), advice)]
    if config.zero == 3:  # which shards weights that a rank has initialized
        bytes_each = WEIGHTS.get(config.precision, torch.float32).itemsize
        whole = {"weights, before ZeRO cuts them": most_parameters(config, sizes, world_size) * bytes_each}
        places.append((whole, device, "cut it with --tp, --pp or --ep first, or take a smaller model"))
    for need, place, advice in places:
        have = memory_of_a_rank(place)
        if sum(need.values()) <= have:
            continue
        source = next((name for name in ("init", "config") if getattr(config, name)), "preset")
        what = f"--{source} {getattr(config, source)}"
        parts = ", ".join(f"{name} {size / 1e9:,.1f}" for name, size in need.items())
        raise UsageError(
            f"{what} needs at least {sum(need.values()) / 1e9:,.1f} GB on a rank ({parts}), which has "
            f"{have / 1e9:,.1f} GB; {advice}"
        )


def check_kernels(config: Config, sizes: LlamaConfig, device: torch.device) -> None:
    """Raise UsageError where the fused kernels cannot do this model."""
    kernels = kernels_on(config, device)
    gpu = device.type == "cuda"
    if not has_triton() and (kernels != "torch" or (config.precision in FP8 and gpu)):
        what = f"--kernels {kernels}" if kernels != "torch" else f"--precision {config.precision}"
        use = "--kernels torch" if kernels != "torch" else "bf16"
        raise UsageError(f"{what} needs Triton, which is not installed (it is for Linux); use {use}")
    if kernels == "triton" and gpu and not has_bf16():
        name = torch.cuda.get_device_name(device)
        raise UsageError(
            f"--kernels triton needs GPUs of compute capability 8.0, and this is {name}; use --kernels torch"
        )
    if config.precision in FP8 and gpu:
        check_fp8(config, sizes, device)
    if kernels == "cuda":
        check_cuda(config, sizes.head_dim, device)
    if kernels != "triton":
        return
    from flash_kernels import check_head_dim  # imported here for ops.py's reason

    if config.precision == "fp64":
        raise UsageError(f"--kernels {config.kernels}: no kernel computes in fp64; use --kernels torch")
    if device.type == "cpu" and config.precision not in ("fp32", "fp16"):
        what = f"--kernels {config.kernels} --precision {config.precision}"
        raise UsageError(f"{what}: Triton's interpreter rounds bf16 wrongly on a CPU; use --kernels torch")
    try:
        check_head_dim(sizes.head_dim)
    except ValueError as error:
        raise UsageError(f"--kernels {config.kernels}: {error}; or use --kernels torch") from None


def check_fp8(config: Config, sizes: LlamaConfig, device: torch.device) -> None:
    """Raise UsageError unless this GPU has fp8 matmuls, for weights of the sizes that a rank has."""
    from fp8_kernels import refusal  # imported here for ops.py's reason

    if reason := refusal(device):
        raise UsageError(f"--precision {config.precision}: {reason}; use {'bf16' if has_bf16() else 'fp16'}")
    mixture = config.mixture(sizes)
    widths = {
        "hidden size": sizes.hidden,
        "query heads": sizes.heads * sizes.head_dim // config.tp,
        "key/value heads": max(sizes.kv_heads // config.tp, 1) * sizes.head_dim,
        "feed-forward": mixture.intermediate if mixture else sizes.intermediate // config.tp,
    }
    for what, width in widths.items():
        if width % 16:
            line = f"{what} of a rank: {width} is not a multiple of 16, which fp8 matmuls need"
            raise UsageError(f"--precision {config.precision}: {line}; use bf16")


def check_cuda(config: Config, head_dim: int, device: torch.device) -> None:
    """Raise UsageError unless chapter 09's CUDA can train this model on this machine."""
    from flash_attention_cuda import HEAD_DIMS  # imported here for ops.py's reason

    here = f"--kernels {config.kernels}"
    if config.precision not in ("bf16", "bf16-master"):
        raise UsageError(
            f"{here} --precision {config.precision}: chapter 09's CUDA multiplies in bf16; use bf16 or bf16-master"
        )
    if config.tp_overlap != "none" or config.fpdt_chunks:
        overlap = f"--tp-overlap {config.tp_overlap}"
        other = f"--fpdt-chunks {config.fpdt_chunks}" if config.tp_overlap == "none" else overlap
        raise UsageError(f"{here} cannot go with {other}, which has products of its own; leave one of them out")
    if head_dim not in HEAD_DIMS:
        raise UsageError(
            f"{here}: a head of {head_dim} numbers; the CUDA attention takes 64 and 128, use other --heads"
        )
    if device.type != "cuda":
        raise UsageError(f"{here} needs a Hopper GPU (sm_90a), and there is no GPU here; use --kernels torch")
    if torch.cuda.get_device_capability(device) != (9, 0):
        name = torch.cuda.get_device_name(device)
        use = "triton" if has_bf16() else "torch"
        raise UsageError(f"{here} needs a Hopper GPU (sm_90a), and this is {name}; use --kernels {use}")
    if not shutil.which("nvcc"):
        raise UsageError(f"{here} is built by nvcc, which is not on the PATH; install the CUDA toolkit or use triton")


def check_compile(config: Config, sizes: LlamaConfig, world_size: int, device: torch.device) -> None:
    """Raise UsageError where torch.compile cannot make one program of a block: where the block waits inside
    for other ranks or for a value, or where its backward is not autograd's."""
    if not config.compile:
        return
    schedule = config.pipeline(world_size, sizes.layers)
    moe = config.mixture(sizes)
    split = bool(schedule) and any(action.kind == W for row in schedule.actions for action in row)  # type: ignore[union-attr]
    waits, own = "waits for other ranks inside a block", "runs a block's backward in its own way"
    barred = [
        (f"--tp {config.tp}", config.tp > 1, waits),
        (f"--cp {config.cp}", config.cp > 1, waits),
        (f"--experts {moe.experts if moe else 0}", moe is not None, "learns inside a block how many rows there are"),
        ("--zero 3", config.zero == 3, waits),
        ("--zero-late-gather", config.zero_late_gather, waits),
        (f"--schedule {config.schedule}", split, own),
        (f"--fpdt-chunks {config.fpdt_chunks}", config.fpdt_chunks > 0, own),
        (f"--recompute {config.recompute}", config.recompute != "none", own),
        (f"--precision {config.precision}", config.precision in FP8, "keeps its scales from step to step"),
        (
            f"--kernels {config.kernels}",
            kernels_on(config, device) != "torch",
            "brings kernels that are compiled already",
        ),
    ]
    for what, wanted, why in barred:
        if wanted:
            raise UsageError(f"--compile cannot go with {what}, which {why}; leave one of them out")
    compiler = os.environ.get("CXX", "g++")
    if not shutil.which(compiler):
        raise UsageError(
            f"--compile needs a C++ compiler, and {compiler} is not on the PATH; install one, or leave it out"
        )
