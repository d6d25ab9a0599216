"""The models the trainer knows, built from chapter 01."""

import chapters  # noqa: F401  finds the chapters below
import torch
from llama import LLAMA3_8B, LLAMA3_70B, Llama, LlamaConfig, init_weights

PRESETS = {
    # 0.74 M parameters on bytes: learns on two CPU cores while you watch
    "tiny": LlamaConfig(hidden=128, layers=4, heads=4, kv_heads=2, intermediate=320),
    # 25 M, the size of a first experiment on one GPU
    "small": LlamaConfig(hidden=512, layers=8, heads=8, kv_heads=4, intermediate=1408),
    # 124 M with GPT-2's vocabulary
    "base": LlamaConfig(50304, hidden=768, layers=12, heads=12, kv_heads=12, intermediate=2048, tied=True),
    "smollm-1.7b": LlamaConfig(
        49152, hidden=2048, layers=24, heads=32, kv_heads=32, intermediate=8192, rope_theta=130000.0, tied=True
    ),
    "llama3-8b": LLAMA3_8B,
    "llama3-70b": LLAMA3_70B,
}


def build(config: LlamaConfig, *, recompute: str, seed: int, dtype: torch.dtype, device: torch.device) -> Llama:
    """The model with its first weights, which depend on `seed` and the parameters' names alone."""
    model = Llama(config, recompute=recompute)
    init_weights(model, seed)
    return model.to(device, dtype)
