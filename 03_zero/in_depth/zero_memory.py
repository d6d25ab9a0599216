"""Where the memory goes: bytes per parameter and rank, by the ZeRO paper's formulas and as measured.

Problem. A model of 7.5 billion parameters has 15 GB of 16-bit weights, but cannot train on a device with 80
GB. Data parallelism does not help, because each further device stores everything again.

Idea. Count first. Mixed-precision training with Adam stores for each parameter (1910.02054, section 3.1):

    2 bytes   weight, 16 bits      \\
    2 bytes   gradient, 16 bits     |  16 bytes: 7.5B parameters take 120 GB.
    4 bytes   master weight, fp32   |  The last three are the optimizer's: K = 12. They are used once a step,
    4 bytes   momentum, fp32        |  elementwise, so one rank's copy of each element is enough.
    4 bytes   variance, fp32       /

    | weights | gradients | master weights, momentum, variance |      one rank of data parallelism
    |   2     |     2     |                 12                 |
                                 ^ stage 1 divides this by N
                    ^ stage 2 this too
         ^ stage 3 this too: 16/N bytes in all, and any model fits, given enough ranks

Formulas (1910.02054, figure 1; sections 5.1 to 5.3 for the bytes stored, 7.1 and 7.2 for the bytes sent):
    stage                 0                   1                   2                  3
    stored per parameter  2 + 2 + K           2 + 2 + K/N         2 + (2 + K)/N      (2 + 2 + K)/N
    sent per step         2 G (N-1)/N         2 G (N-1)/N         2 G (N-1)/N        3 G (N-1)/N
for gradients, and weights, of G bytes. Stage 3 sends (N-1)/N G_kept less if it keeps weights of G_kept bytes
from forward to backward instead of gathering them twice. For activations and buffers see zero_r.py.

Run it:
    python zero_memory.py                                    the paper's tables; bytes on one rank at stage 0
    torchrun --nproc_per_node 4 zero_memory.py               the same on 4 ranks (Gloo on CPU, NCCL on GPU)
Stages 1 and 2 are measured by zero_stages.py, stage 3 by zero3.py.
The last line is PASS, or the script exits with 1 and says which number is off.
"""

from __future__ import annotations

import sys

import torch.distributed as dist
from _zero_demo import OneLineParser, Row, measure, report, table, world

STAGES = (0, 1, 2, 3)
GB = 1e9  # the paper's gigabyte

# ------------------------------------------------------------------------------------------------------- the formulas


def bytes_per_parameter(stage: int, ranks: int, k: int = 12, weight: int = 2, gradient: int = 2) -> float:
    """Bytes of weights, gradients and optimizer states on a rank, per parameter of the model.

    `k` bytes of optimizer state per parameter; plain fp32 training with Adam is k=8, weight=4, gradient=4. A
    bf16 model that accumulates gradients in fp32 has weight=2 and gradient=4: 4 Psi / N from stage 2 on, not
    2 Psi / N. Raises ValueError for a stage that does not exist. 1910.02054, figure 1.
    """
    if stage not in STAGES:
        raise ValueError(f"stage {stage} does not exist; use 0, 1, 2 or 3")
    # --- exercise 3.21: what does each stage divide by the number of ranks? ---
    weights = weight / ranks if stage >= 3 else weight
    gradients = gradient / ranks if stage >= 2 else gradient
    states = k / ranks if stage >= 1 else k
    return weights + gradients + states
    # --- end exercise ---


def largest_model(memory: float, stage: int, ranks: int) -> float:
    """Number of parameters whose weights, gradients and states fill `memory` bytes on a rank.

    It is an upper limit, with no room for activations (1910.02054, table 2, where a device has 32 GB).
    """
    # --- exercise 3.22: the same formula, solved for the model ---
    return memory / bytes_per_parameter(stage, ranks)
    # --- end exercise ---


def bytes_sent(
    stage: int, ranks: int, gradients: int, kept: int = 0, micro_batches: int = 1, weights: int | None = None
) -> float:
    """Bytes each rank sends per step. `gradients` and `weights`: bytes of all (default: as many).

    Payloads times the ring's formula. With fp32 reduction and bf16 weights, weights = gradients / 2.

    From stage 2 on every micro-batch is reduced at once. Stage 3 gathers the weights for forward and for backward,
    except `kept` bytes that stay gathered in between. 1910.02054, section 7.
    """
    # --- exercise 3.23: reduce-scatters and all-gathers of each stage, a ring's (N-1)/N of the tensor each ---
    weights = gradients if weights is None else weights
    if stage == 3:
        times = micro_batches * (gradients + 2 * weights - kept)
    elif stage == 2:
        times = micro_batches * gradients + weights  # reduce-scatters, and one all-gather of new weights
    elif stage == 1:
        times = gradients + weights  # the two halves of an all-reduce, with the update in between
    else:
        times = 2 * gradients
    return times * (ranks - 1) / ranks
    # --- end exercise ---


def paper_tables() -> list[str]:
    """Table 1 of 1910.02054, and table 2 for more world sizes (there it is 64, times tensor parallelism)."""
    lines = []
    degrees = (1, 4, 16, 64, 256, 1024)
    for size in (7.5e9, 128e9, 1e12):
        rows = {
            f"{ranks} ranks": [f"{size * bytes_per_parameter(stage, ranks) / GB:.4g}" for stage in STAGES]
            for ranks in degrees
        }
        title = f"GB per rank for {size / 1e9:g}B parameters (table 1)"
        lines += table(title, ("stage 0", "stage 1", "stage 2", "stage 3"), rows)
    rows = {
        f"{ranks} ranks": [f"{largest_model(32 * GB, stage, ranks) / 1e9:.4g}B" for stage in STAGES]
        for ranks in degrees
    }
    lines += table("largest model whose states fit in 32 GB (table 2)", (f"stage {s}" for s in STAGES), rows)
    needed = 1e12 * bytes_per_parameter(3, 1024) / GB
    return [*lines, f"10^12 parameters on 1024 ranks at stage 3: {needed:.4g} GB each", ""]


# ------------------------------------------------------------------------------------------------------------- demo


def main() -> None:
    OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False).parse_checked()
    with world() as (group, device):
        ranks = dist.get_world_size(group)
        if dist.get_rank(group) == 0:
            print("\n".join(paper_tables()))
            print(f"measured: a decoder in bf16 with AdamW on {ranks} {device.type} rank(s), not sharded\n")
        held, psi, _, sent = measure(0, group, device)
        must_hold = round(psi * bytes_per_parameter(0, ranks))
        must_send = bytes_sent(0, ranks, 2 * psi)
        same = abs(must_send - sent) < 1e-6
        rows: list[Row] = [
            (f"stage 0: bytes held, Psi = {psi:,}", must_hold, held, must_hold == held),
            ("stage 0: bytes sent (payload x formula)", f"{must_send:.0f}", f"{sent:.0f}", same),
        ]
        right = report(rows, group)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
