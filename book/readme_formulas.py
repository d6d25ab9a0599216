# ruff: noqa: E402 -- the chapters must be on the path before they are imported
"""Formulas of the READMEs, read as they stand there and computed beside the code that they describe.

Above a table whose cells are formulas, and above a line such as `W = 2·V·H + ...`, stands a comment:

    <!-- formulas: zero_stages -->

It names a function below. That gets the table's formulas as one function of the symbols, in the order of reading, and
yields pairs: what the README says for some sizes, and what the chapter's code says.

A formula within a sentence, or in a line with words, is computed only if `quoted` has it; others are not.
"""

import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
for folder in ("01_single_gpu", "03_zero", "04_tensor_parallel", "08_fpdt"):
    if str(ROOT / folder) not in sys.path:
        sys.path.append(str(ROOT / folder))

import fpdt
import referees  # finds the trainer and the depth of the chapters
import single_gpu
import tensor_parallel
import torch
import zero
from accounting import activations, gpt_activations, gpt_parameters
from collectives import bytes_sent, seconds
from context_ring import pairs_of
from context_ulysses import sent_per_layer
from expert_dispatch import bytes_sent as rows_sent
from expert_dispatch import rows_that_leave
from fixed_dispatch import bytes_sent_fixed
from formulas import TIE, is_cell, is_formula, python
from llama import LlamaConfig
from parallel_block import kept_bytes
from zero_hybrid import bytes_across
from zero_memory import bytes_per_parameter
from zero_memory import bytes_sent as zero_bytes_sent
from zero_offload import bytes_apart, bytes_over_the_link

MIXED_PRECISION = ROOT / "10_mixed_precision" / "mixed_precision.py"
Read = Callable[..., list[float]]
Pairs = Iterator[tuple[float, float]]


def value(cell: str, symbols: dict[str, float]) -> float:
    if re.fullmatch("[A-Z]( [A-Z])*", cell.strip()):  # letters only: in another table they would be names
        return math.prod(symbols[letter] for letter in cell.split())
    return eval(python(cell), {"__builtins__": {}, "ceil": math.ceil, "log2": math.log2, "s": symbols})


def displayed(readme: str) -> Iterator[tuple[int, str, list[str]]]:
    """(line, the tie above it or "", formulas) of each table and each indented line that shows formulas."""
    lines, fenced, tie, tables = readme.splitlines(), False, "", False
    rows: list[str] = []
    for number, line in enumerate([*lines, ""], 1):
        fenced ^= line.startswith("```")
        if fenced:
            continue
        if found := TIE.fullmatch(line.strip()):
            tie = found[1]
        elif line.startswith("|"):
            rows += line.strip("| ").split(" | ")
            tables = True
        elif line.startswith("    ") and (told := re.fullmatch(r" +\w+ = (.*)", line)) and is_formula(told[1]):
            yield number, tie, [told[1]]
            tie = ""
        elif tables:
            shown = [cell for cell in rows if (is_cell if tie else is_formula)(cell)]
            if shown:
                yield number, tie, shown
            rows, tables, tie = [], False, ""


# ------------------------------------------------------------------------------------------------------------ chapters

SIZES = [{}, {"vocab_size": 300}, {"hidden": 96}, {"n_layers": 5}, {"n_kv_heads": 1}, {"ffn_hidden": 100}]


def parameters_of_a_llama(read: Read) -> Pairs:
    for sizes in SIZES:
        c = single_gpu.ModelConfig(**sizes)
        read_with = {"V": c.vocab_size, "H": c.hidden, "L": c.n_layers, "N_kv": c.n_kv_heads, "D": c.head_dim}
        yield read(**read_with, F=c.ffn_hidden)[0], single_gpu.num_params(c)


def saved_per_token(read: Read) -> Pairs:
    for sizes in SIZES:
        c = single_gpu.ModelConfig(**sizes)
        read_with = {"H": c.hidden, "N_kv": c.n_kv_heads, "D": c.head_dim, "N": c.n_heads, "F": c.ffn_hidden}
        norm, attn, o_proj, mlp, loss = read(**read_with, V=c.vocab_size)
        per_token = c.n_layers * (2 * norm + attn + o_proj + mlp) + norm + loss
        yield 4 * (2 * 24 * per_token + 24 * c.head_dim), single_gpu.saved_activation_bytes(c, 2, 24)


def kept_by_operation(read: Read) -> Pairs:
    """One term for each row; the rows of fused attention and of explicit attention take turns."""
    for sizes in ({}, {"hidden": 96}, {"layers": 1}, {"kv_heads": 2}, {"intermediate": 100}, {"vocab_size": 300}):
        c = LlamaConfig(
            **{"vocab_size": 256, "hidden": 64, "layers": 3, "heads": 4, "kv_heads": 4, "intermediate": 192} | sizes
        )
        B, S = 2, 32
        for e in (2, 4):
            s = {"T": B * S, "B": B, "S": S, "H": c.hidden, "e": e, "w": max(e, 4), "N": c.heads, "D": c.head_dim}
            given = read(**s, N_kv=c.kv_heads, F=c.intermediate, V=c.vocab_size)
            wide, normal, root, read_by, qkv, lse, out, gate, down, last, loss, words = given
            block = 2 * (wide + normal + root + read_by) + qkv + lse + out + gate + down
            table = 4 * S * c.head_dim
            right = activations(c, B, S, e)
            yield c.layers * block + last + loss + words + table, sum(right.values())


def ring_of_gradients(read: Read) -> Pairs:
    for P in (2, 4, 8):
        for said in read(P=P, G=4 * 840):
            yield said, bytes_sent("all_reduce_ring", 840, 4, P, 0)


COLLECTIVES = ["broadcast_naive", "broadcast_tree", "scatter", "all_gather", "all_to_all"]
COLLECTIVES += ["all_reduce_naive", "all_reduce_tree", "all_reduce_ring", "barrier"]
TWINS = {"broadcast_naive": "reduce_naive", "broadcast_tree": "reduce_tree"}
TWINS |= {"scatter": "gather", "all_gather": "reduce_scatter"}


def times_of_collectives(read: Read) -> Pairs:
    for P in (2, 3, 8):
        for said, name in zip(read(P=P, n=1000, **{"α": 7.0, "β": 0.01}), COLLECTIVES, strict=True):
            yield said, seconds(name, 1000, P, 7.0, 0.01)
            yield said, seconds(TWINS.get(name, name), 1000, P, 7.0, 0.01)


def zero_by_the_file(N: int, M: int, k: int) -> list[float]:
    """Stored and sent, stage by stage, by zero.py: w = g = g' = 8 and K = 8 k."""
    found: list[float] = []
    for stage in (1, 2, 3):
        found += zero.expected_bytes(stage, 120, N, M, k)
    return found


def zero_stages(read: Read) -> Pairs:
    for N, M, k in ((2, 1, 1), (4, 3, 3)):
        said = read(w=8, g=8, K=8 * k, dp=N, M=M, **{"Ψ": 120, "g'": 8})
        yield from zip(said[2:], zero_by_the_file(N, M, k), strict=True)
        data = read(w=2, g=2, K=12, dp=4, M=M, **{"Ψ": 120, "g'": 4})[:2]  # the example's 10 weights, on 4 ranks
        yield from zip(data, (10 * bytes_per_parameter(0, 4), zero_bytes_sent(0, 4, 20)), strict=True)


def zero_compared(read: Read) -> Pairs:
    """In bf16 with Adam a summed gradient has 4 bytes: two more than in the paper, of a shard or of everything."""
    for N in (2, 8):
        data, data_sent, one, one_sent, two, three, tensor, pipeline = read(dp=N, tp=N, pp=N, **{"Ψ": 1000})
        without = N / (N - 1)  # the factor that this table leaves out
        yield data, 1000 * bytes_per_parameter(0, N)
        yield data_sent, zero_bytes_sent(0, N, 2000) * without
        yield one, 1000 * (bytes_per_parameter(1, N) + 4 / N)
        yield one_sent, zero_bytes_sent(1, N, 2000) * without
        yield two, 1000 * (bytes_per_parameter(2, N, gradient=4))
        yield three, 1000 * (bytes_per_parameter(3, N, k=12, weight=0, gradient=4))
        yield from ((said, 1000 * bytes_per_parameter(0, 1) / N) for said in (tensor, pipeline))


def zero_micro_batches(read: Read) -> Pairs:
    for N, M in ((2, 2), (8, 5)):
        two, three = read(N=N, M=M, **{"Ψ": 1000})
        yield two, zero_bytes_sent(2, N, 2000, micro_batches=M) - zero_bytes_sent(2, N, 2000)
        gathers = (M - 1) * 2 * 2000 * (N - 1) / N  # of the weights, in any case
        yield three, zero_bytes_sent(3, N, 2000, micro_batches=M) - zero_bytes_sent(3, N, 2000) - gathers


def zero_of_two_kinds(read: Read) -> Pairs:
    for S, R in ((2, 3), (8, 4)):
        plain, hybrid, inside, across = read(N=S * R, S=S, R=R, **{"Ψ": 1000})
        yield plain, 1000 * bytes_per_parameter(3, S * R)
        yield hybrid, 1000 * bytes_per_parameter(3, S)
        yield inside, zero_bytes_sent(3, S, 2000)
        yield across, bytes_across(S, R, 2000)


def zero_on_the_host(read: Read) -> Pairs:
    for N, M in ((1, 1), (4, 3)):
        said = read(N=N, M=M, **{"Ψ": 1000})
        link = bytes_over_the_link(N, 2000, 2000, M)
        right = [1000 * bytes_per_parameter(2, N)]
        for stage in (2, 3):
            right += [*(1000 * part for part in bytes_apart(stage, N)), *link]
        yield from zip(said, right, strict=True)


def zero_by_hand(read: Read) -> Pairs:
    c = single_gpu.ModelConfig()
    scales = c.hidden * (2 * c.n_layers + 1)  # of norms; nor does the embedding multiply, it is looked up
    multiply = single_gpu.num_params(c) - c.vocab_size * c.hidden - scales
    attention = 12 * 48 * 24 * c.hidden * c.n_layers
    work, down, up = read(T=48, **{"Ψ": multiply})
    yield work, single_gpu.flops(c, 2, 24) - attention
    yield from zip((down, up), bytes_over_the_link(1, 2 * multiply, 2 * multiply), strict=True)


def kept_with_dropout(read: Read) -> Pairs:
    c = LlamaConfig(vocab_size=256, hidden=64, layers=2, heads=8, kv_heads=4, intermediate=192)
    B, S, H, D = 2, 32, c.hidden, c.hidden // c.heads
    for ranks, sequence in ((1, False), (2, True)):
        tp = SimpleNamespace(size=ranks, sequence_parallel=sequence)
        got = read(B=B, S=S, H=H, N_kv=c.kv_heads, D=D, N=c.heads, F=c.intermediate)
        norms, inputs, q_out, k_v, lse, feed_forward = got
        outside = ranks if sequence else 1
        said = (norms + inputs) / outside + (q_out + k_v + lse + feed_forward) / ranks
        yield 4 * said, sum(kept_bytes(c, B, S, tp, 4).values())


def pairs_of_layouts(read: Read) -> Pairs:
    for P, r in ((2, 0), (4, 1), (4, 3)):
        contiguous, striped = read(P=P, r=r, s=24 // P)
        yield contiguous, pairs_of("contiguous", 24, r, P, True)
        yield striped, pairs_of("striped", 24, r, P, True)


def blocks_of_a_ring(read: Read) -> Pairs:
    for P in (2, 8):
        block = 2 * 64 // P * 2 * 8  # K and V of 64/P tokens, 2 heads of 8 numbers
        yield read(cp=P)[0], sent_per_layer("ring", 64, 64, P, 8, 2) / block


def contexts_compared(read: Read) -> Pairs:
    S, N, N_kv = 64, 8, 4
    for cp in (2, 4):
        ring, ulysses = read(cp=cp, N=N, N_kv=N_kv, M=S * 64)
        yield ring, sent_per_layer("ring", S, 64, cp, N, N_kv)
        yield ulysses, sent_per_layer("ulysses", S, 64, cp, N, N_kv)


def sent_by_contexts(read: Read) -> Pairs:
    S, N, N_kv = 64, 8, 4
    for P in (2, 4):
        gather, ring, hops, ulysses, both, megatron = read(P=P, R=P, N=N, N_kv=N_kv, C=N_kv, M=S * 64)
        sent = sent_per_layer("ring", S, 64, P, N, N_kv)
        rounds = sent / (2 * S // P * N_kv * 8)
        yield from ((gather, sent), (ring, sent), (hops, rounds), (both, 4 + rounds))
        yield ulysses, sent_per_layer("ulysses", S, 64, P, N, N_kv)
        yield megatron, sent_per_layer("megatron", S, 64, P, N, N_kv)


def pipeline_compared(read: Read) -> Pairs:
    """The planner counts in fp32, this table in 2 bytes; the files of 03 and 04 count in 8."""
    of = referees.layout(pp=4, micro_batches=8)
    tokens_of_a_step = 8 * referees.BATCH * referees.SEQUENCE
    H, L, t = referees.MODEL.hidden, referees.MODEL.layers, 4
    pipeline, three, _ = read(T=tokens_of_a_step, H=H, L=L, t=t, **{"Ψ": 120})
    yield 2 * pipeline, referees.wire(of, "pp", "between stages", rank=1)
    yield 4 * three, zero_by_the_file(t, 1, 1)[-1]
    config = tensor_parallel.ModelConfig(64, 64, 2, 8, 4, 96, batch=2, seq_len=32)
    said = read(T=config.batch * config.seq_len, H=config.hidden, L=1, t=t, **{"Ψ": 120})[-1]
    yield 4 * said, tensor_parallel.expected_bytes(config, t, False, False)[2]


def fpdt_costs(read: Read) -> Pairs:
    b, cp, layers = 4, 2, fpdt.N_LAYERS  # elements of 4 bytes: sums have as many
    for u in (2, 4):
        c, n, m, D = 96 // u, fpdt.N_HEADS // cp, fpdt.N_KV_HEADS // cp, fpdt.HEAD_DIM
        Q, K, L = c * n * D * b, 2 * c * m * D * b, c * n * b
        offload, offload_back, fetch, fetch_back, sent, stored = read(u=u, cp=cp, Q=Q, K=K, L=L, **{"Q'": Q})
        expected = fpdt.expected_bytes(96, cp, u, b)
        yield layers * (offload + offload_back), expected["copied to the host"]
        yield layers * (fetch + fetch_back), expected["copied to the device"]
        yield layers * 2 * sent, expected["sent"]
        yield layers * stored + u * 2 * Q, expected["stored on the host"]


def rows_of_dispatch(read: Read) -> Pairs:
    for P, T in ((2, 5), (4, 7)):
        chosen = torch.zeros(T, 1, dtype=torch.int64)  # every token goes everywhere, whatever it chose
        yield read(P=P, T=T)[0], sum(rows_that_leave("everywhere", chosen, chosen == 0, P, P, 0))


def quoted() -> Iterator[tuple[str, str, dict[str, float], float]]:
    """(chapter, words of its README with the formula between ‹ and ›, symbols, what the code says)."""
    sizes = {"h": 96, "L": 3, "v": 256, "s": 64, "b": 2, "a": 4}
    yield "01", "is ‹h·v + L(12h² + 13h) + 2h›", sizes, gpt_parameters(96, 3, 256)
    kept = gpt_activations(96, 1, 4, 64, 2)
    yield "01", "saves ‹s·b·h·(34 + 5·a·s/h)› bytes", sizes, kept
    yield "02", "of them sends ‹2(P−1)/P · n›", {"P": 4, "n": 3360}, bytes_sent("all_reduce_ring", 840, 4, 4, 0)
    alone = {"N": 4, "Ψ": 1000}
    yield "03", "exactly ‹3 · 2Ψ (N−1)/N› with keep=False", alone, zero_bytes_sent(3, 4, 2000)
    c = tensor_parallel.ModelConfig(64, 64, 2, 8, 4, 96, batch=2, seq_len=32)
    block = {"T": c.batch * c.seq_len, "H": c.hidden, "tp": 4}
    for words, overlapped in (("that is ‹8 T H (tp−1)/tp› per rank", False), ("sends ‹10 T H (tp−1)/tp›.", True)):
        yield "04", words, block, tensor_parallel.expected_bytes(c, 4, True, overlapped)[2] / 8
    even = {"K": 2, "T": 6, "H": 16, "ep": 4, "P": 4, "E": 8, "C": 6}
    counts = rows_sent("pairs", [[0] * 4] * 4, 0, 16, 8, 8, 8)
    rows = [[3 * (i != j) for j in range(4)] for i in range(4)]  # K T / ep for each other rank
    sent = (rows_sent("pairs", rows, 0, 16, 8, 8, 8) - counts) / 8
    yield "07", "with an even load = ‹4 K T H (ep − 1)/ep› · (bytes of an element)", even, sent
    fixed = bytes_sent_fixed(4, 8, 6, 16, 8) / 8
    yield "07", "bytes sent by a rank = ‹4 (P − 1) (E/P) C H› · (bytes of a number)", even, fixed
    judged = re.search(r"error > ([\d.]+) \* recipe.floor .* error <= ([\d.]+) \*", MIXED_PRECISION.read_text())
    assert judged
    yield "10", "must be more than ‹7.5› times as large", {}, float(judged[1])
    yield "10", "must stay within ‹1.5› times that error", {}, float(judged[2])


TIES = [name for name, made in list(vars().items()) if getattr(made, "__annotations__", {}).get("read") == Read]
