# ruff: noqa: E402 -- the chapters must be on the path before they are imported
"""What the cheat sheet's formulas are held against: the planner's bytes, the chapters' own, the simulator's idle time.

A referee returns the values of the symbols in one example, and what each formula of its row must give there: memory,
sent, idle time. None of them reads techniques.toml. The examples divide evenly: padding is the planner's business.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
for folder in ("01_single_gpu", "03_zero", "08_fpdt", "11_5d_trainer", "11_5d_trainer/planner"):
    if str(ROOT / folder) not in sys.path:
        sys.path.append(str(ROOT / folder))

import paths  # noqa: F401  finds the depth of the chapters
import fpdt
import single_gpu
import zero
from llama import LlamaConfig
from moe_layer import MoEConfig
from options import Config, UsageError, parse  # noqa: F401  what the test asks the trainer
from plan_memory import (  # noqa: F401  some for the front page's figure
    Layout,
    activations,
    block_activations,
    block_weights,
    held,
    schedule_of,
    stage_layers,
    weights_of,
)
from plan_traffic import flows
from schedule_simulator import Times, peak_activations, simulate
from zero_hybrid import bytes_across
from zero_offload import bytes_apart, bytes_over_the_link

MODEL = LlamaConfig(vocab_size=256, hidden=64, layers=8, heads=8, kv_heads=4, intermediate=192)
MIXTURE = MoEConfig(hidden=64, intermediate=192, experts=8, top_k=2)
BATCH, SEQUENCE = 2, 32


@dataclass
class Verdict:
    symbols: dict[str, float]
    memory: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    bubble: list[float] = field(default_factory=list)


def layout(**given) -> Layout:
    return Layout(**{"micro_batch": BATCH, "micro_batches": 3, "seq_len": SEQUENCE} | given)


def wire(of: Layout, axis: str, *whats: str, rank: int = 0, moe: MoEConfig | None = None) -> float:
    found = flows(MODEL, moe, of, rank)
    return sum(flow.wire for flow in found if flow.axis == axis and (not whats or flow.what in whats))


def sizes(**more: float) -> dict[str, float]:
    c = MODEL
    known = {"H": c.hidden, "J": c.kv_heads * c.head_dim, "a": c.heads, "D": c.head_dim, "F": c.intermediate}
    known |= {"V": c.vocab_size, "L": c.layers, "T": BATCH * SEQUENCE, "S_len": SEQUENCE}
    return known | {"b": 4, "w": 4, "g": 4, "k": 8} | more


def parameters(of: Layout) -> int:
    return sum(weight.numel for weight in weights_of(MODEL, None, of))


# ------------------------------------------------------------------------------------------------------ one rank


def accumulation(recompute: bool = False) -> Verdict:
    c = single_gpu.ModelConfig()
    symbols = {"b": 4, "T": 2 * 24, "S_len": 24, "H": c.hidden, "J": c.n_kv_heads * c.head_dim, "a": c.n_heads}
    symbols |= {"D": c.head_dim, "F": c.ffn_hidden, "V": c.vocab_size, "L": c.n_layers}
    return Verdict(symbols, [single_gpu.saved_activation_bytes(c, 2, 24, recompute)])


def flash() -> Verdict:
    """Of what a block keeps: all that comes with the tokens of attention, and grows with them alone."""
    without = block_activations(MODEL, None, layout(), "none")
    norms = 2 * BATCH * SEQUENCE * (3 * MODEL.hidden * 4 + 4)
    feed_forward = 4 * BATCH * SEQUENCE * MODEL.intermediate * 4
    return Verdict(sizes(), [without - norms - feed_forward])


def masters() -> Verdict:
    of = layout(dp=4, zero=1, precision="bf16-master")
    memory = sum(held(MODEL, None, of).values())
    return Verdict(sizes(Psi=parameters(of), N=4), [memory], [wire(of, "data", *GRADIENTS)])


# ------------------------------------------------------------------------------------------------- data, and ZeRO

GRADIENTS = ("gradients", "new weights", "weights")


def data(stage: int = 0) -> Verdict:
    of = layout(dp=4, zero=stage)
    memory = [sum(held(MODEL, None, of).values())]
    symbols = sizes(Psi=parameters(of), N=4, M=3)
    if stage < 3:
        return Verdict(symbols, memory, [wire(of, "data", *GRADIENTS)])
    # The planner knows that the trainer keeps the root and the last layer from forward to backward. The file of the
    # chapter does not keep them; its parameters and gradients have 8 bytes.
    _, sent = zero.expected_bytes(3, symbols["Psi"], dp=4, m=3, k=1)
    return Verdict(symbols, memory, [sent / 2])


def hybrid() -> Verdict:
    Psi = parameters(layout())
    memory = sum(held(MODEL, None, layout(dp=2, zero=3)).values())
    return Verdict(sizes(Psi=Psi, N=8, h=2, M=3), [memory], [bytes_across(2, 4, 4 * Psi, 3)])


def offload() -> Verdict:
    Psi = parameters(layout())
    apart = [part * Psi for part in bytes_apart(2, 4, 12, 2, 2)]
    return Verdict(sizes(Psi=Psi, N=4, M=3, w=2, g=2, k=12), apart, list(bytes_over_the_link(4, 2 * Psi, 2 * Psi, 3)))


# --------------------------------------------------------------------------------------------- tensor and context


def tensor(sequence: bool = False) -> Verdict:
    of = layout(tp=2, sequence_parallel=sequence, micro_batches=1)
    weights = sum(weight.numel for weight in block_weights(MODEL, None, of, 0)) * 16
    kept, ends = block_activations(MODEL, None, of), ("embedding", "output layer", "softmax", "shares of gradients")
    sent = wire(of, "tp") - wire(of, "tp", *ends)
    return Verdict(sizes(t=2), [kept] if sequence else [weights, kept], [sent / MODEL.layers])


def context(**kind: int) -> Verdict:
    of = layout(**kind, micro_batches=1)
    axis, ranks = next(iter(kind.items()))
    symbols = sizes(T=BATCH * SEQUENCE // ranks, c=ranks, U=ranks)
    return Verdict(symbols, [block_activations(MODEL, None, of)], [wire(of, axis) / MODEL.layers])


# ------------------------------------------------------------------------------------------- pipeline and experts


def pipeline(name: str, v: int = 1) -> Verdict:
    """Rank 1 of 4, with 8 micro-batches; F, B and W take a unit each. A is 1: stages are counted."""
    of = layout(pp=4, schedule=name, stages_per_rank=v, micro_batches=8)
    schedule = schedule_of(of)
    times = Times(1, 1, 1, pair=3) if name == "dualpipe" else Times(1, 1, 1)
    symbols = sizes(Psi=dense_stage(of), p=4, r=1, v=v, M=8, A=1, f_time=1)
    memory = [float(peak_activations(schedule.actions[1]))]
    if name == "dualpipe":
        memory.insert(0, sum(held(MODEL, None, of, 1).values()))
    return Verdict(symbols, memory, [wire(of, "pp", "between stages", rank=1)], [simulate(schedule, times).bubble])


def dense_stage(of: Layout) -> float:
    """Parameters of one stage in the middle; of a rank that holds two mirrored ones, their mean."""
    return sum(weight.numel for weight in weights_of(MODEL, None, of, 1)) / (2 if of.mirrored else 1)


def expert() -> Verdict:
    of = layout(dp=4, ep=4, micro_batches=1)
    experts = sum(weight.numel for weight in block_weights(MODEL, MIXTURE, of, 0) if weight.expert)
    sent = wire(of, "ep", "rows of experts", moe=MIXTURE)
    return Verdict(sizes(E=8, K=2, e=4), [experts * 16], [sent / MODEL.layers])


def chunks() -> Verdict:
    S, cp, u, b = 96, 2, 4, 4
    c, n, m, D = S // u, fpdt.N_HEADS // cp, fpdt.N_KV_HEADS // cp, fpdt.HEAD_DIM
    symbols = {"u": u, "c": cp, "L": fpdt.N_LAYERS, "Q": c * n * D * b, "KV": 2 * c * m * D * b, "Z": c * n * b}
    expected = fpdt.expected_bytes(S, cp, u, b)
    sent = [expected[what] for what in ("sent", "copied to the host", "copied to the device")]
    return Verdict(symbols, [expected["stored on the host"]], sent)


REFEREES: dict[str, Callable[[], Verdict]] = {
    "accumulation": accumulation,
    "recomputation": lambda: accumulation(recompute=True),
    "flash": flash,
    "masters": masters,
    "data": data,
    "zero1": lambda: data(1),
    "zero2": lambda: data(2),
    "zero3": lambda: data(3),
    "hybrid": hybrid,
    "offload": offload,
    "tensor": tensor,
    "sequence": lambda: tensor(sequence=True),
    "ring": lambda: context(ring=4),
    "ulysses": lambda: context(ulysses=2),
    "naive": lambda: pipeline("naive"),
    "afab": lambda: pipeline("afab"),
    "1f1b": lambda: pipeline("1f1b"),
    "interleaved": lambda: pipeline("interleaved", 2),
    "zb-h1": lambda: pipeline("zb-h1"),
    "zb-v": lambda: pipeline("zb-v", 2),
    "dualpipe": lambda: pipeline("dualpipe"),
    "expert": expert,
    "fpdt": chunks,
}
