"""Chapter 9, the optimizer in Triton: AdamW that accesses every element once, over one flat buffer.

The problem. AdamW is eight elementwise operations. With one PyTorch operation each, every one reads and
writes full tensors. A model has hundreds of tensors, most so small that launching a kernel takes longer than
running it.

The idea. No element needs any other element. So a program loads a block of the weights, gradients and both
moments, computes in registers, and writes the block back. Tensor boundaries do not matter, so all parameters
may be concatenated in one buffer, updated by one kernel:

    parameters   [ embed ......... ][ q_proj .. ][ norm ][ ...          p.data is a view of its part
    gradients    [ embed ......... ][ q_proj .. ][ norm ][ ...          p.grad is a view: backward adds into it
    programs     |  0  |  1  |  2  |  3  |  4  |  5  | ...              split the buffer anywhere

ZeRO (chapter 3) has such buffers anyway: a rank's shard of a bucket is an arbitrary slice of one.

Formulas (1711.05101, algorithm 2), step t from 1, moments in float32:

    m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g²
    p = p - lr wd p - lr/(1 - b1^t) · m / (sqrt(v) / sqrt(1 - b2^t) + eps)

Bytes moved for each float32 parameter: p, g, m, v read (16) and p, m, v written (12): 28. A bfloat16 copy of
the weights for the next forward pass, written by the same kernel, makes it 30; a separate kernel would move 6
more. A factor for the gradients (clipping, or undoing a loss scale) is a pointer to a scalar, without extra
pass or wait. Skipping a step is also free: if the factor is NaN, the kernel writes nothing. The caller makes
it NaN where the norm is not finite: a norm of inf clips by 0, and 0 · inf would be written as NaN.

    python fused_adamw.py                           against torch.optim.AdamW and float64; ends with PASS
    python fused_adamw.py --steps 20 --width 100
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from _fused_demo import demo_of_fused_adamw
from _interpreter import tl, triton
from fused import check
from torch import Tensor, nn

BLOCK = 1024  # 4 warps of 32 threads: 8 elements of each buffer per thread, in loads of 16 bytes
ALIGN = 64  # elements: parameters in a flat buffer begin at a multiple, for fast matmuls


@triton.jit
def adamw_kernel(
    p_ptr, g_ptr, m_ptr, v_ptr, copy_ptr, scale_ptr, numel,
    decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, root_correction, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # 64 bits: a buffer may pass 2^31 elements
    inside = at < numel
    p = tl.load(p_ptr + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(m_ptr + at, mask=inside, other=0.0)
    v = tl.load(v_ptr + at, mask=inside, other=0.0)
    if scale_ptr is not None:
        scale = tl.zeros_like(g) + tl.load(scale_ptr)
        g *= scale
        inside = inside & (scale == scale)  # NaN: nothing is written, so the step is skipped
    # --- exercise 9.40: one step of AdamW for these elements ---
    m = beta1 * m + one_minus_beta1 * g
    v = beta2 * v + one_minus_beta2 * g * g
    p -= decay * p  # decoupled: the decay bypasses the moments
    p -= step_size * m / (tl.sqrt(v) / root_correction + eps)
    # --- end exercise ---
    tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=inside)
    tl.store(m_ptr + at, m, mask=inside)
    tl.store(v_ptr + at, v, mask=inside)
    if copy_ptr is not None:
        tl.store(copy_ptr + at, p.to(copy_ptr.dtype.element_ty), mask=inside)


def adamw_(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    scale: Tensor | None = None,
    copy: Tensor | None = None,
) -> None:
    """One step in place, in one kernel. p, g, m, v have one shape and are contiguous; m and v are float32.

    step   1 for the first step
    scale  float32, one element, on the device: the gradients are multiplied by it as they are read. If it is NaN,
           nothing changes.
    copy   of p's shape, usually bfloat16: gets the new weights
    """
    buffers = dict(p=p, g=g, m=m, v=v) | ({} if copy is None else {"copy": copy})
    check(**buffers)
    for name, x in buffers.items():
        if x.numel() != p.numel() or not x.is_contiguous():
            raise ValueError(
                f"{name} {list(x.shape)}, stride {x.stride()}, must be contiguous and have p's {p.numel()} elements"
            )
        if x.dtype == torch.float64 or (name in "mv" and x.dtype != torch.float32):
            raise ValueError(f"{name} is {x.dtype}; moments must be float32, and float64 is torch.optim.AdamW's")
    if scale is not None and (scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != p.device):
        raise ValueError(f"scale {list(scale.shape)} {scale.dtype} on {scale.device} must be one float32 on {p.device}")
    if step < 1:
        raise ValueError(f"step {step}: the first step is 1, as the corrections 1 - beta^step must not be 0")
    # In Python's float64, because 1 - 0.999 in float32 is wrong in the fifth digit.
    beta1, beta2 = betas
    step_size = lr / (1 - beta1**step)
    root_correction = (1 - beta2**step) ** 0.5
    adamw_kernel[(triton.cdiv(p.numel(), BLOCK),)](
        p, g, m, v, copy, scale, p.numel(),
        lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, step_size, root_correction, eps, BLOCK, num_warps=4,
    )  # fmt: skip


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW with this chapter's kernel: same arguments, groups, states, checkpoints.

    One kernel per parameter: only a few for flat buffers, from `flatten` or the shards of ZeRO.
    Moments are float32 also for weights of lower precision.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, and called by its __init__ for each group."""
        super().add_param_group(param_group)
        self.check_options(self.param_groups[-1])

    @staticmethod
    def check_options(group: dict[str, Any]) -> None:
        for option in ("amsgrad", "maximize", "capturable", "differentiable"):
            if group.get(option):
                raise ValueError(f"{option}=True is not in the kernel; leave it out, or use torch.optim.AdamW")
        if group["weight_decay"] and not group.get("decoupled_weight_decay", True):
            raise ValueError("weight decay that goes through the moments is not in the kernel; use torch.optim.Adam")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which casts moments to the dtype of the weights; here they stay float32."""
        for group in state_dict["param_groups"]:
            self.check_options({**group, "capturable": False, "differentiable": False})  # these two change no number
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(saved, parameters, strict=True):
            for name in ("exp_avg", "exp_avg_sq") if index in state_dict["state"] else ():
                self.state[p][name] = state_dict["state"][index][name].to(p.device, torch.float32)

    @torch.no_grad()
    def step(self, closure: None = None, *, scale: Tensor | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, multiplied by `scale` if there is one. A scale of NaN leaves
        weights and moments as they are, but is counted as a step."""
        if closure is not None:
            raise ValueError("this AdamW takes no closure; compute the loss before step()")
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                for piece, gradient in getattr(p, "pieces", ()):
                    if piece.grad is None or piece.grad.data_ptr() != gradient.data_ptr():
                        raise RuntimeError("a gradient has left its flat buffer; use zero_grad(set_to_none=False)")
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = torch.zeros(p.shape, dtype=torch.float32, device=p.device)
                    state["exp_avg_sq"] = torch.zeros(p.shape, dtype=torch.float32, device=p.device)
                if state["step"].device.type != "cpu":  # from a checkpoint: avoid a host wait
                    state["step"] = state["step"].cpu()
                state["step"] += 1
                options = {name: group[name] for name in ("betas", "eps", "weight_decay")}
                moments = state["exp_avg"], state["exp_avg_sq"]
                step = int(state["step"])
                lr = float(group["lr"])
                adamw_(p, p.grad.contiguous(), *moments, step=step, lr=lr, scale=scale, **options)


@torch.no_grad()
def flatten(parameters: Iterable[nn.Parameter]) -> nn.Parameter:
    """Concatenate parameters in one buffer and return it, a parameter for the optimizer, with its gradient.

    The parameters stay in their modules, as views of the buffer; backward adds to views of its gradient. From
    then on use `zero_grad(set_to_none=False)`: None would detach the views. All share one set of
    hyperparameters, so make one buffer per group.
    """
    parameters = list(dict.fromkeys(parameters))  # a tied parameter once
    if not all(p.requires_grad for p in parameters):
        raise ValueError("a frozen parameter does not belong in a flat buffer: its weights would decay; leave it out")
    kinds = {(p.dtype, p.device) for p in parameters}
    if len(kinds) != 1:
        raise ValueError(f"a flat buffer needs parameters of one dtype and device, not {len(kinds)} kinds: {kinds}")
    # --- exercise 9.41: one buffer for the weights, one for the gradients, and every parameter a view of both ---
    starts, end = [], 0
    for p in parameters:
        starts.append(end)
        end += -(-p.numel() // ALIGN) * ALIGN  # the gap behind p: zeros with gradient zero, which AdamW leaves zero
    flat = nn.Parameter(torch.zeros(end, dtype=parameters[0].dtype, device=parameters[0].device))
    flat.grad = torch.zeros_like(flat)
    pieces = []
    for p, start in zip(parameters, starts, strict=True):
        weight, gradient = (x[start : start + p.numel()].view(p.shape) for x in (flat.data, flat.grad))
        weight.copy_(p)
        if p.grad is not None:
            gradient.copy_(p.grad)
        p.data, p.grad = weight, gradient
        pieces.append((p, gradient))
    # --- end exercise ---
    flat.pieces = pieces  # type: ignore[attr-defined]
    return flat


def bytes_moved(numel: int, weight: int = 4, gradient: int = 4, copy: int = 0) -> int:
    """Bytes that a step reads and writes, for weights, gradients and a copy of so many bytes per element."""
    return numel * (2 * weight + gradient + 4 * 4 + copy)


def bytes_held(numel: int) -> int:
    """Bytes of the optimizer's states: two float32 moments (and a scalar for the step)."""
    return 8 * numel


if __name__ == "__main__":
    sys.exit(demo_of_fused_adamw(AdamW, flatten, bytes_held))
