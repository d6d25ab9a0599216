"""Chapter 1, accounting: parameters, bytes and FLOPs of a training step, by formulas checked on the model.

The problem. Whether a model fits on a device, and whether a run is fast, can be calculated before any GPU is
rented. Formulas in papers are rounded and incomplete. The ones here are exact for the model of llama.py: they
match PyTorch to the byte and to the FLOP.

The idea. Four kinds of data are in memory during a step, and each has its own formula:

    weights, gradients, optimizer states    bytes per parameter, by the precision recipe: 16 or 20
    activations                             saved by autograd in forward, by batch, sequence and recomputation

    one block, micro-batch of T = B S tokens, e bytes per element, fp32 statistics of w = max(e, 4) bytes:
        2 norms         2 T (H w + 2 H e + w)        the input in fp32, the normalised input, the output, 1 / rms
        q, k, v, out    T (2 H + 2 N_kv D) e         after RoPE; `out` is what o_proj multiplies
        attention       fused     B N S w            the log-sum-exp of every row
                        explicit  B N S S (w [+ e])  the probabilities [and their bf16 copy]
        MLP             4 T F e                      gate, up, silu(gate), silu(gate) * up

    GPT, for comparison (fp16, with dropout):   L s b h (34 + 5 a s / h)                (2205.05198, equation 1)

Compute is counted in matmul FLOPs: 2 per multiply-add, backward twice the forward (once for the inputs, once for
the weights). So a step costs 3 x forward, and 4 x with full recomputation, or nearly: see `recomputed_flops`.

    python accounting.py            check every formula on the model; the last line is PASS
    python accounting.py --tables   print the tables of README.md

Symbols: see llama.py. GB = 10^9 bytes throughout, the unit of a GPU's data sheet.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from functools import partial

import torch
from llama import (
    LLAMA3_8B,
    LLAMA3_70B,
    LLAMA3_405B,
    MODES,
    TINY,
    Llama,
    LlamaConfig,
    OneLineParser,
    Parts,
    Report,
    attention,
    attention_math,
    kept_for_backward,
    next_token_loss,
)
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

GB = 10**9

# ------------------------------------------------------------------------------------------------------ parameters


def parameters(config: LlamaConfig) -> int:
    """Number of weights of a Llama, adapters included. A test compares it with `Llama(config)` up to 405B."""
    c = config
    # --- exercise 1.28: count the weights without building the model ---
    attention_weights = 2 * c.hidden * c.attention_width + 2 * c.hidden * c.kv_heads * c.head_dim  # q, o; k, v
    attention_weights += c.qkv_bias * (c.attention_width + 2 * c.kv_heads * c.head_dim)  # biases of q, k, v
    attention_weights += c.qk_norm * 2 * c.head_dim
    mlp_weights = 3 * c.hidden * c.intermediate  # gate, up, down
    # An adapter has lora_rank weights for each input and each output of its layer: of q, o; k, v; gate, up, down.
    sides = 2 * (c.hidden + c.attention_width) + 2 * (c.hidden + c.kv_heads * c.head_dim)
    sides += 3 * (c.hidden + c.intermediate)
    mlp_weights += c.lora_rank * sides
    block = attention_weights + mlp_weights + 2 * c.hidden  # and two norms
    vocabulary = c.vocab_size * c.hidden * (1 if c.tied else 2)  # embedding and lm_head
    return vocabulary + c.layers * block + c.hidden  # and the last norm
    # --- end exercise ---


def gpt_parameters(hidden: int, layers: int, vocab_size: int) -> int:
    """h·v + L(12h² + 13h) + 2h: a GPT with biases, LayerNorm, MLP of 4h, tied embeddings; without positions.

    Per layer: attention 4h² + 4h, MLP 8h² + 5h, two LayerNorms 4h; at the end one more LayerNorm, 2h.
    """
    return hidden * vocab_size + layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden


# ---------------------------------------------------------------------------------------------------- global batch


def micro_steps(global_batch: int, micro_batch: int, dp: int = 1) -> int:
    """Accumulation steps, so that micro_batch · steps · dp = global_batch (samples). ValueError if none are."""
    # --- exercise 1.29: global-batch arithmetic ---
    per_step = micro_batch * dp  # samples of all ranks in one forward pass
    if global_batch < 1 or global_batch % per_step:
        near = max(1, round(global_batch / per_step)) * per_step
        raise ValueError(
            f"global batch {global_batch} is not a multiple of micro-batch {micro_batch} x {dp} data-parallel "
            f"rank(s) = {per_step}; use for example {near}"
        )
    return global_batch // per_step
    # --- end exercise ---


# ------------------------------------------------------------------ memory: weights, gradients, optimizer states


@dataclass(frozen=True)
class Recipe:
    """Bytes per parameter that are stored from one step to the next (1910.02054, section 3.1)."""

    name: str
    weights: int
    gradients: int
    master_weights: int = 0  # fp32 copy for the optimizer: a bf16 weight is too coarse for small steps
    main_gradients: int = 0  # fp32 gradients to accumulate in: bf16 sums lose small terms
    optimizer: int = 8  # AdamW: first and second moment in fp32

    def bytes_per_parameter(self) -> int:
        return self.weights + self.gradients + self.master_weights + self.main_gradients + self.optimizer


FP32 = Recipe("fp32", weights=4, gradients=4)
MIXED = Recipe("bf16 mixed precision", weights=2, gradients=2, master_weights=4)
MIXED_FP32_GRADIENTS = replace(MIXED, name="bf16 mixed, fp32 gradients too", main_gradients=4)
RECIPES = (FP32, MIXED, MIXED_FP32_GRADIENTS)

# ------------------------------------------------------------------------------------------- memory: activations

AROUND_THE_BLOCKS = ("last norm", "log-probabilities", "tokens, labels (int64)", "RoPE tables (fp32)")


def activations(
    config: LlamaConfig, batch: int, seq: int, element: int = 4, kernel: str = "fused", recompute: str = "none"
) -> dict[str, int]:
    """Bytes autograd saves between forward and backward of one micro-batch, by purpose. Exact without adapters.

    element    bytes per element of weights and activations: 2 for bf16, 4 for fp32, 8 for fp64
    kernel     "fused" (`attention` on the CPU: q, k, v, out and the log-sum-exp) or "explicit" (`attention_math`)
    recompute  "none", "selective" or "full", as in `Llama`
    """
    c = config
    e = element
    T = batch * seq
    wide = max(e, 4)  # statistics, probabilities and the loss are taken in fp32 or better
    # --- exercise 1.30: every byte that forward leaves behind for backward ---
    norm = T * (c.hidden * wide + c.hidden * e + wide) + T * c.hidden * e  # input, normalised, 1/rms; the output
    qkv = T * (c.attention_width + 2 * c.kv_heads * c.head_dim) * e
    out = T * c.attention_width * e  # the input of o_proj
    if c.qk_norm:  # as `norm`, for each head of q and k; RoPE does not save the output
        qkv += T * (c.heads + c.kv_heads) * (c.head_dim * (wide + e) + wide)
    score = wide if e == wide else wide + e  # a probability, and in bf16 the copy that is multiplied with v
    core = {"fused": T * c.heads * wide, "explicit": batch * c.heads * seq * seq * score}[kernel]
    mlp = 4 * T * c.intermediate * e
    per_block = {"norms": 2 * norm, "q, k, v, out": qkv + out, "attention core": core, "MLP": mlp}
    if recompute == "selective":
        per_block["attention core"] = 0
    elif recompute == "full":
        per_block = {"block inputs": T * c.hidden * e}
    kept = {name: c.layers * size for name, size in per_block.items()}
    around = (
        norm,
        T * c.vocab_size * wide + wide,  # and one scalar, by which a mean would divide
        2 * T * 8,
        2 * seq * (c.head_dim // 2) * 4,  # one pair for all layers
    )
    return kept | dict(zip(AROUND_THE_BLOCKS, around, strict=True))
    # --- end exercise ---


def gpt_activations(hidden: int, layers: int, heads: int, seq: int, batch: int, recompute: str = "none") -> int:
    """Bytes of a GPT's activations in fp16 with dropout (2205.05198, equation 1 and table 2).

    34·s·b·h are the linear layers, norms and dropout masks; 5·a·s²·b are softmax output, its dropout mask and output.
    """
    per_token = {
        "none": 34 * hidden + 5 * heads * seq,
        "selective": 34 * hidden,  # the 5·a·s²·b are recomputed
        "full": 2 * hidden,  # the input of the layer, 2 bytes per element
    }[recompute]
    return layers * seq * batch * per_token


# ----------------------------------------------------------------------------------------------------------- FLOPs


def forward_flops(config: LlamaConfig, batch: int, seq: int) -> dict[str, int]:
    """Matmul FLOPs of one forward pass: 2 for each multiply-add. Left out: norms, RoPE, softmax; also adapters.

    Attention counts the full [S, S] square, although a causal kernel may skip half of it. PaLM has the same
    convention (2204.02311, appendix B), so values are comparable between papers.
    """
    c = config
    T = batch * seq
    return {
        "projections": c.layers * 2 * T * 2 * c.hidden * (c.attention_width + c.kv_heads * c.head_dim),
        "attention core": c.layers * 4 * batch * seq * seq * c.attention_width,  # q kᵀ and probabilities · v
        "MLP": c.layers * 6 * T * c.hidden * c.intermediate,
        "lm_head": 2 * T * c.hidden * c.vocab_size,
    }


def recomputed_flops(config: LlamaConfig, batch: int, seq: int, recompute: str, kernel: str = "fused") -> int:
    """FLOPs of recomputation in the backward pass.

    They are fewer than one forward, because the second call ends with the last tensor that backward needs. A
    matmul's backward needs its inputs, not its result, so the last recomputed matmul does not run again.
    """
    forward = forward_flops(config, batch, seq)
    if recompute == "selective":  # explicit: only q kᵀ; the fused kernel cannot be split and runs in full
        return forward["attention core"] // (2 if kernel == "explicit" else 1)
    if recompute == "full":
        down_proj = forward["MLP"] // 3
        return forward["projections"] + forward["attention core"] + forward["MLP"] - down_proj
    return 0


@dataclass(frozen=True)
class StepFlops:
    model: int  # needed by the mathematics
    hardware: int  # executed by the device


def step_flops(config: LlamaConfig, batch: int, seq: int, recompute: str = "none", kernel: str = "fused") -> StepFlops:
    """FLOPs of one training step on `batch` samples: the numerators of MFU and HFU.

    Every MFU in these chapters has this numerator, with attention as the full square even under a causal
    mask, 12 L H S FLOPs per token, as in PaLM, Megatron's papers and nanoGPT. Exceptions are marked.
    """
    # --- exercise 1.31: model FLOPs and hardware FLOPs ---
    # Backward multiplies twice for each forward product: gradient of the input, gradient of the weight.
    model = 3 * sum(forward_flops(config, batch, seq).values())
    return StepFlops(model, model + recomputed_flops(config, batch, seq, recompute, kernel))
    # --- end exercise ---


# Dense bf16 matmul peaks in TFLOP/s: half of the data sheet's rate where that is with 2:4 sparsity. Sources:
# NVIDIA's data sheets and architecture white papers per product, AMD's MI300X and MI250X data sheets.
# V100 and T4 have no bf16: fp16. GeForce: with fp32 accumulation. First match wins: special names come first.
PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    (r"\bGB200\b", 2500.0),
    (r"\bB200\b", 2250.0),
    (r"\bGH200\b", 989.4),
    (r"\bH200 NVL\b", 835.5),
    (r"\bH200\b", 989.4),
    (r"\bH100 PCIe\b", 756.0),
    (r"\bH100 NVL\b", 835.5),
    (r"\bH100\b", 989.4),
    (r"\bA100\b", 312.0),
    (r"\bL40S\b", 362.0),
    (r"\bL4\b", 121.0),
    (r"\bA10\b", 125.0),
    (r"\bRTX 4090$", 165.2),
    (r"\bRTX 3090$", 71.0),
    (r"\bV100-PCIE\b", 112.0),
    (r"\bV100\b", 125.0),
    (r"\bT4\b", 65.0),
    (r"\bMI300X\b", 1307.4),
    (r"\bMI250X\b", 191.5),  # half of the package's 383, because it appears as two devices
)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of the device with this name (torch.cuda.get_device_name), or None if unknown."""
    if " MIG " in device_name:
        return None  # a slice of a GPU
    for pattern, tflops in PEAK_TFLOPS:
        if re.search(pattern, device_name, re.IGNORECASE):
            return tflops * 1e12
    return None


def utilization(flops: int, seconds: float, peak: float | None) -> str:
    """Percentage of the peak, or "n/a" if the peak is unknown. A guessed peak is worse than none."""
    return "n/a" if peak is None else f"{100 * flops / seconds / peak:.1f}%"


# ---------------------------------------------------------------------------------------------------------- tables


def markdown(name: str, columns: list[str], rows: list[list[str]]) -> str:
    """A table between the comments that surround it in README.md; all columns but the first are numeric."""
    lines = [f"<!-- table: {name} -->", "| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "<!-- end table -->"])


def tables() -> list[str]:
    """The tables of README.md that are pure arithmetic."""
    llamas = {"Llama-3 8B": LLAMA3_8B, "Llama-3 70B": LLAMA3_70B, "Llama-3 405B": LLAMA3_405B}
    counts = [[name, f"{parameters(config):,}"] for name, config in llamas.items()]
    counts.append(["GPT-3 175B, by the GPT formula", f"{gpt_parameters(12288, 96, 50257):,}"])

    billions = (1, 7, 70, 405)
    states = [
        [r.name, f"{r.bytes_per_parameter()}", *(f"{n * r.bytes_per_parameter():,}" for n in billions)] for r in RECIPES
    ]

    gpts = {"22B": (6144, 48, 64), "175B (GPT-3)": (12288, 96, 96), "530B": (20480, 105, 128), "1T": (25600, 128, 160)}
    gpt = [
        [name, *(f"{gpt_activations(*sizes, seq=2048, batch=1, recompute=r) / GB:,.1f}" for r in MODES)]
        for name, sizes in gpts.items()
    ]

    llama = []
    for kernel in ("explicit", "fused"):
        for mode in MODES:
            kept = activations(LLAMA3_8B, batch=1, seq=8192, element=2, kernel=kernel, recompute=mode)
            blocks = sum(size for what, size in kept.items() if what not in AROUND_THE_BLOCKS)
            rest = sum(kept.values()) - blocks
            extra = recomputed_flops(LLAMA3_8B, 1, 8192, mode, kernel) / step_flops(LLAMA3_8B, 1, 8192).model
            cells = [f"{blocks / GB:,.1f}", f"{rest / GB:,.1f}", f"{sum(kept.values()) / GB:,.1f}", f"{extra:.1%}"]
            llama.append([f"{kernel}, {mode}", *cells])

    batches = []
    for micro, dp, seq, tokens in ((1, 128, 8192, 4_194_304), (2, 8, 4096, 1_048_576), (4, 1, 64, 512)):
        steps = micro_steps(tokens // seq, micro, dp)
        batches.append([f"{micro} × {steps} × {dp}", f"{tokens // seq:,}", f"{seq:,}", f"{tokens:,}"])

    flops = []
    for seq in (2048, 8192, 131072):
        forward = forward_flops(LLAMA3_8B, 1, seq)
        total = sum(forward.values())
        share = [f"{forward[part] / total:.1%}" for part in ("projections", "MLP", "lm_head", "attention core")]
        flops.append(
            [f"{seq:,}", f"{total / seq / 1e9:.1f}", *share, f"{total / (2 * parameters(LLAMA3_8B) * seq):.2f}"]
        )

    return [
        markdown("parameters", ["model", "parameters"], counts),
        markdown("states", ["GB of weights, gradients, states", "bytes each", "1B", "7B", "70B", "405B"], states),
        markdown("gpt activations", ["GB, sequence 2048, micro-batch 1", *MODES], gpt),
        markdown("llama activations", ["attention, recompute", "blocks", "rest", "all", "extra FLOPs"], llama),
        markdown("global batch", ["micro-batch × steps × ranks", "samples", "sequence", "tokens"], batches),
        markdown(
            "flops",
            ["sequence", "GFLOPs per token", "projections", "MLP", "lm_head", "attention", "over 2 × parameters"],
            flops,
        ),
    ]


# ------------------------------------------------------------------------------------------------------------ demo


def held_by_training(recipe: Recipe, config: LlamaConfig) -> int:
    """Train `config` for one step by `recipe`, and count the bytes that are still stored afterwards.

    Only tensors with one element per weight count; AdamW also has a 4-byte counter for every parameter.
    """
    model = Llama(config).to(torch.float32 if recipe.weights == 4 else torch.bfloat16)
    masters = [p.detach().float() if recipe.master_weights else p for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters)
    next_token_loss(model, torch.zeros(1, 8, dtype=torch.long)).backward()
    for master, p in zip(masters, model.parameters(), strict=True):
        if recipe.master_weights:
            master.grad = p.grad.float()  # the optimizer steps in fp32 ...
    optimizer.step()
    held: list[Tensor] = []
    for master, p in zip(masters, model.parameters(), strict=True):
        if recipe.master_weights:
            p.data.copy_(master)  # ... and the model computes with the rounded copy
            held += [master]
            if recipe.main_gradients:
                held += [master.grad]
            else:
                master.grad = None
        held += [p, p.grad, *(s for s in optimizer.state[master].values() if s.dim())]
    return sum(t.nbytes for t in held)


def main() -> int:
    parser = OneLineParser(description="Hold the formulas for parameters, memory and FLOPs against the model.")
    parser.add_argument("--tables", action="store_true", help="print the tables of README.md and end")
    if parser.parse_args().tables:
        print("\n\n".join(tables()))
        return 0

    report = Report()

    def exact(what: str, predicted: int, measured: int) -> None:
        report.add(what, f"{predicted:,}", f"{measured:,}", predicted == measured)

    for name, config in {"Llama-3 8B": LLAMA3_8B, "Llama-3 70B": LLAMA3_70B, "tiny": TINY}.items():
        with torch.device("meta"):  # shapes without memory
            built = sum(p.numel() for p in Llama(config).parameters())
        exact(f"parameters: {name}", parameters(config), built)
    for recipe in RECIPES:
        held = held_by_training(recipe, TINY)
        exact(f"bytes held: {recipe.name}", recipe.bytes_per_parameter() * parameters(TINY), held)

    config = LlamaConfig(layers=2)
    batch = 2
    seq = 64
    tokens = torch.randint(config.vocab_size, (batch, seq), generator=torch.Generator().manual_seed(0))
    for kernel, function in {"fused": attention, "explicit": attention_math}.items():
        for mode in MODES:
            model = Llama(config, replace(Parts(), attention=function), recompute=mode)
            forward = partial(next_token_loss, model, tokens)
            _, kept = kept_for_backward(forward, model)
            exact(
                f"activations: {kernel}, {mode}", sum(activations(config, batch, seq, 4, kernel, mode).values()), kept
            )
            if kernel == "explicit":  # PyTorch's counter does not support fused attention on the CPU
                with FlopCounterMode(display=False) as counter:
                    forward().backward()
                flops = step_flops(config, batch, seq, mode, kernel)
                exact(f"matmul FLOPs of a step: {mode}", flops.hardware, counter.get_total_flops())
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
