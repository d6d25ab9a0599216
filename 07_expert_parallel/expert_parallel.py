"""Expert parallelism: a layer of many experts, of which each rank holds a few. The tokens travel.

A mixture of experts replaces one feed-forward layer by E small ones, the experts, of which each token uses only K.
Parameters grow with E, computation with K. Two problems follow. Something has to choose the K experts of a token, in a
way that can be trained: the router. And E experts are too many for one device: each of P ranks holds E/P of them,
whole, and tokens travel to their experts and back. How many go where is known only after the choice.

    E = 4, K = 1, P = 2           rank 0: experts 0, 1       rank 1: experts 2, 3
    tokens want                   a>2  b>0  c>2  d>1         p>0  q>3  r>0  s>0
    1. sort by expert             b d | a c                  p r s | q           by expert is by rank, too
    2. all-to-all of counts       "1 1 | 2 0"                "3 0 | 0 1"         the dispatch table, line by line
    3. all-to-all of rows         b d p r s                  a c q               sorted by sender
    4. sort by expert, compute    b p r s > 0,  d > 1        a c > 2,  q > 3     each expert on its rows only
    5. all of it back             a b c d                    p q r s             times weight, summed over the K

    y = sum over the K chosen e of  g_e expert_e(x)        expert_e(x) = w2_e (silu(w1_e x) * w3_e x)          (SwiGLU)
    s = softmax(gate x), in float32;  g_e = s_e / (sum of the K chosen s), and for K = 1 the score itself, g_e = s_e
    balance loss = sum over e of f_e P_e,  f_e = E/(K T) (how often e was chosen),  P_e = mean of s_e over the T tokens

Through g, and through P_e in the balance loss, the router learns. With K = 1, a score divided by itself would be 1
whatever the router says: its gradient would be zero. T and the counts in f are those of all ranks.

A gradient that has come through the all-to-all is that of all tokens, wherever they were: it is complete. Nothing is
divided by P: the loss was divided by the number of tokens of all ranks, before backward.

    experts              held by one rank each      gradient summed over nobody      (over replicas, if there were any)
    everything else      held by every rank         gradient summed over all ranks

    held    E/P experts of 3 H FF numbers          sent by a layer, forward, all ranks together: 2 H (rows that leave)

GShard (Lepikhin et al. 2020, arXiv 2006.16668); Switch (Fedus et al. 2021, 2101.03961, equations 2 and 4-6: K = 1 and
the balance loss); Mixtral (Jiang et al. 2024, 2401.04088, section 2.1: K = 2 and SwiGLU experts).

    python expert_parallel.py                                       one rank
    torchrun --nproc_per_node 4 expert_parallel.py                  four: gloo on CPUs, nccl on GPUs
    torchrun --nproc_per_node 2 expert_parallel.py --top-k 3 --experts 6
Ends with PASS when loss, every gradient and the weights after three steps are those of one process that has all tokens
and computes all experts on all of them, to 1e-10, and bytes are what the formulas say.
"""

import argparse
import gc
import os
import sys
import time
import tokenize
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

# T tokens of this rank, H numbers for each (hidden size), FF numbers inside an expert, V words; E experts, of which a
# token uses K; P ranks (P_e, with an index, is a mean of scores). A pair is a token with one of its K experts; a row is
# what travels for it, H numbers.
LAYERS, H, FF, V, LENGTH = 2, 32, 24, 256, 24
SEQUENCES = (3, 1, 2, 2)  # of ranks 0, 1, 2, 3, and again from 4 on: uneven on purpose
BALANCE, IGNORE = 0.02, -100  # factor of the balance loss; the label of a token that has none
EXPERTS = ("w1", "w3", "w2")  # the weights that are cut; all others are on every rank
sent = Counter()  # bytes that have left this rank, "rows" and "counts"

# ------------------------------------------------------------------------------------------------------- the choice


def route(x: Tensor, gate: Tensor, K: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H], gate [E, H] -> the K experts of each token [T, K], their weights g [T, K], all scores s [T, E].

    A choice is a comparison. In bf16, with three significant digits, experts would tie or swap places, so the scores
    are computed in float32 (Switch, section 2.4), under autocast too.
    """
    # --- exercise 7.1: scores in float32 or better, the K best, and what each of them counts ---
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        scores = F.linear(x.to(wide), gate.to(wide)).softmax(-1)
    best, experts = scores.topk(K)
    weights = best / best.sum(-1, keepdim=True) if K > 1 else best  # s/s = 1 would cut the router off
    return experts, weights, scores
    # --- end exercise ---


def balance_loss(scores: Tensor, experts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's share of  sum over e of f_e P_e;  the shares of all ranks add up to it. It is 1 for an even load.

    f is a count, without gradient; P_e has one, and lowers the scores of busy experts. Busy are those that all ranks
    together chose often: with counts of its own, each rank would even out its own few tokens, which is another loss.
    """
    E, K = scores.shape[1], experts.shape[1]
    # --- exercise 7.2: f from the counts of all ranks, P_e as this rank's share of a mean over all tokens ---
    counts = torch.bincount(experts.flatten(), minlength=E)  # [E]
    if group is not None:
        dist.all_reduce(counts, group=group)  # [E] -> [E], the sum over the ranks
    pairs = counts.sum().to(scores.dtype)  # K T of all ranks; a quotient of two integers would be a float32
    f = counts * (E / pairs)
    return (f * scores.sum(0)).sum() / (pairs / K)
    # --- end exercise ---


def expert(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    """One expert on its rows, [n, H] -> [n, H]."""
    return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)


def moe_naive(x: Tensor, gate: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, K: int, group=None) -> tuple:
    """The simplest correct form: every expert computes every token, and most is multiplied by zero. E/K times the work,
    and all experts on one device; nothing is sorted and nothing travels. This is the oracle."""
    experts, weights, scores = route(x, gate, K)
    share = torch.zeros_like(scores).scatter(1, experts, weights)  # [T, E], zero for those not chosen
    every = torch.stack([expert(x, *w) for w in zip(w1, w3, w2, strict=True)], dim=1)  # [T, E, H]
    return (every * share[..., None]).sum(1).to(x.dtype), balance_loss(scores, experts, group), experts


# --------------------------------------------------------------------------------------------------- the tokens travel


def exchange_rows(x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    """The first send[0] rows of x go to rank 0 of the group, the next send[1] to rank 1, and so on."""
    y = x.new_empty(sum(receive), x.shape[1])
    dist.all_to_all_single(y, x.contiguous(), receive, send, group=group)  # [n, H] -> all-to-all -> [n', H]
    leave = len(x) - send[dist.get_rank(group)]  # what a rank sends to itself does not leave it
    sent["rows"] += leave * x.shape[1] * x.element_size()
    return y


class Exchange(torch.autograd.Function):
    """`exchange_rows` with a derivative."""

    @staticmethod
    def forward(ctx, x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return exchange_rows(x, send, receive, group)

    @staticmethod
    def backward(ctx, dy: Tensor):
        # --- exercise 7.3: rows have moved and nothing was added up; where do their gradients go? ---
        return exchange_rows(dy, ctx.receive, ctx.send, ctx.group), None, None, None
        # --- end exercise ---


def dispatch_table(experts: Tensor, E: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """experts [T, K] -> the pairs t K + k in the order of their experts [T K]; how many rows this rank sends to each
    rank for each of its experts [P, E/P]; how many it receives from each rank for each of its own [P, E/P]."""
    P = dist.get_world_size(group)
    # --- exercise 7.4: sort the pairs, count them, and tell every rank what to expect ---
    order = experts.flatten().argsort(stable=True)  # experts of rank 0 first, then those of rank 1: by rank, too
    send = torch.bincount(experts.flatten(), minlength=E).view(P, E // P)  # [E] -> [P, E/P]
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send, group=group)  # [P, E/P]: line r goes to rank r; line r came from rank r
    # --- end exercise ---
    sent["counts"] += send.nbytes - send[0].nbytes
    return order, send, receive


def run_experts(rows: Tensor, counts: list[int], w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    """Each expert of this rank on its own rows, [n', H] -> [n', H]. One without rows computes zero rows: its
    gradient is zero, not None. A rank that skipped them all would miss the all-to-alls of the others' backward."""
    return torch.cat([expert(x, *w) for x, *w in zip(rows.split(counts), w1, w3, w2, strict=True)])


def moe(x: Tensor, gate: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, K: int, group: dist.ProcessGroup) -> tuple:
    """x [T, H] of this rank, w1, w3 [E/P, FF, H] and w2 [E/P, H, FF] of its experts -> y [T, H], its share of the
    balance loss, experts [T, K]. The same numbers as `moe_naive`; an expert works on the rows that want it, only."""
    experts, weights, scores = route(x, gate, K)
    order, send, receive = dispatch_table(experts, len(gate), group)
    # --- exercise 7.5: there, by expert, compute, and all the way back ---
    out, back = send.sum(1).tolist(), receive.sum(1).tolist()  # rows for each rank, rows from each rank
    rows = Exchange.apply(x[order // K], out, back, group)  # [T K, H] -> all-to-all -> [n', H], by sender, then expert
    mine = torch.arange(receive.shape[1], device=x.device).repeat(len(receive))  # [P E/P]: 0 1 .. 0 1 .. for P senders
    by_expert = mine.repeat_interleave(receive.flatten()).argsort(stable=True)  # [n']
    answers = run_experts(rows[by_expert], receive.sum(0).tolist(), w1, w3, w2)
    answers = answers[by_expert.argsort()]  # [n', H], by sender again
    answers = Exchange.apply(answers, back, out, group)  # [n', H] -> all-to-all -> [T K, H], in the order they left
    pairs = answers[order.argsort()].view(-1, K, x.shape[1])  # [T K, H] -> [T, K, H]
    y = (pairs * weights[..., None]).sum(1).to(x.dtype)  # weights are float32 or better, and so is the sum
    # --- end exercise ---
    return y, balance_loss(scores, experts, group), experts


def sum_gradients(weights: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    """After backward: every gradient becomes that of the tokens of all ranks."""
    for name, weight in weights.items():
        # --- exercise 7.6: whose gradient is not complete yet? ---
        if not name.endswith(EXPERTS):
            dist.all_reduce(weight.grad, group=group)  # a sum: the loss is divided by the tokens of all ranks already
        # --- end exercise ---


# --------------------------------------------------------------------------------------------- a model, and its step


def whole_weights(E: int, device: str) -> dict[str, Tensor]:
    """The first weights of the whole model, the same in every layout."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5).to(device)

    weights = {"embed": draw(V, H), "head": draw(V, H)}
    for i in range(LAYERS):
        weights |= {f"{i}.qkv": draw(3 * H, H), f"{i}.out": draw(H, H), f"{i}.gate": draw(E, H)}
        weights |= {f"{i}.w1": draw(E, FF, H), f"{i}.w3": draw(E, FF, H), f"{i}.w2": draw(E, H, FF)}
    return weights


def my_weights(whole: dict[str, Tensor], rank: int, P: int) -> dict[str, Tensor]:
    """What a rank holds: E/P experts, and the rest. Clones, since a view would keep the whole weight alive."""
    return {n: (w.chunk(P)[rank] if n.endswith(EXPERTS) else w).clone().requires_grad_() for n, w in whole.items()}


def text(step: int, rank: int, device: str) -> tuple[Tensor, Tensor]:
    """Tokens and labels [B, LENGTH] of a rank: bytes of Python's own tokenizer. Rank 1 has not a single valid label."""
    data = torch.frombuffer(bytearray(Path(tokenize.__file__).read_bytes()), dtype=torch.uint8).long().to(device)
    B = SEQUENCES[rank % len(SEQUENCES)]
    both = data[(5000 * step + 300 * rank) % 20000 :][: B * (LENGTH + 1)].view(B, LENGTH + 1)
    return both[:, :-1], torch.full_like(both[:, 1:], IGNORE) if rank == 1 else both[:, 1:]


def loss_of(w: dict, tokens: Tensor, labels: Tensor, valid: int, layer: Callable) -> tuple[Tensor, list[Tensor]]:
    """A rank's share of the loss: a sum over its tokens / `valid` ones of all ranks; and experts [T, K] by layer."""
    x, balance, choices = w["embed"][tokens], 0.0, []
    for i in range(LAYERS):
        q, k, v = F.linear(F.rms_norm(x, (H,)), w[f"{i}.qkv"]).chunk(3, -1)
        x = x + F.linear(F.scaled_dot_product_attention(q, k, v, is_causal=True), w[f"{i}.out"])
        h = F.rms_norm(x, (H,)).flatten(0, 1)  # [B, LENGTH, H] -> [T, H]: to an expert, a token is a token
        y, share, experts = layer(h, *(w[f"{i}.{name}"] for name in ("gate", *EXPERTS)))
        x, balance = x + y.view_as(x), balance + share
        choices.append(experts)
    logits = F.linear(F.rms_norm(x, (H,)), w["head"])
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return loss / valid + BALANCE * balance, choices


def train(w: dict[str, Tensor], batches: list, valid: list[int], layer: Callable, group=None) -> tuple:
    """Three steps of plain SGD -> losses, gradients of each step, and who went where in the last one."""
    losses, gradients = [], []
    for (tokens, labels), count in zip(batches, valid, strict=True):
        sent.clear()
        for weight in w.values():
            weight.grad = None
        loss, choices = loss_of(w, tokens, labels, count, layer)
        loss.backward()
        losses.append(loss.detach())
        if group is not None:
            sum_gradients(w, group)
            dist.all_reduce(losses[-1], group=group)  # for the log
        gradients.append({name: weight.grad.clone() for name, weight in w.items()})
        with torch.no_grad():
            for weight in w.values():
                weight -= 0.1 * weight.grad
    return losses, gradients, choices


# ---------------------------------------------------------------------------------------------------------- the proof


def expected_bytes(tables: list[Tensor], rank: int) -> dict[str, int]:
    """What leaves a rank in forward and backward. tables: of each layer [P, E], rows of each rank for each expert.

    Of its own rows: the row, and in backward the gradient of the answer. Of others' rows: the answer, and in backward
    the gradient of the row."""
    P, E = tables[0].shape
    here, table = slice(rank * E // P, (rank + 1) * E // P), sum(tables)
    rows = 2 * (table[rank].sum() + table[:, here].sum() - 2 * table[rank, here].sum()).item()
    return {"rows": rows * H * 8, "counts": len(tables) * (P - 1) * E // P * 8}


def check(K: int, E: int, group: dist.ProcessGroup, device: str) -> list[str]:
    """Train on the ranks, and on one process; what is off, in words."""
    P, rank, whole = dist.get_world_size(group), dist.get_rank(group), whole_weights(E, device)
    everyone = [[text(step, r, device) for r in range(P)] for step in range(3)]
    valid = [sum(int((labels != IGNORE).sum()) for _, labels in ranks) for ranks in everyone]
    w, right_w = my_weights(whole, rank, P), my_weights(whole, 0, 1)
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # the first message of a group opens its connections
    start = time.perf_counter()
    mine = train(w, [ranks[rank] for ranks in everyone], valid, partial(moe, K=K, group=group), group)
    seconds, measured = time.perf_counter() - start, dict(sent)
    one_process = [[torch.cat(part) for part in zip(*ranks, strict=True)] for ranks in everyone]
    right = train(right_w, one_process, valid, partial(moe_naive, K=K))

    T = [tokens.numel() for tokens, _ in everyone[0]]  # of each rank
    tables = [torch.stack([part.flatten().bincount(minlength=E) for part in c.split(T)]) for c in right[2]]
    errors = [(a - b).abs() for a, b in zip(mine[0], right[0], strict=True)]
    for got, want in [*zip(mine[1], right[1], strict=True), (w, right_w)]:
        part = my_weights(want, rank, P)  # of the oracle's gradients or weights, those of this rank
        errors += [(got[name] - part[name]).detach().abs().max() for name in w]
    error, expected = torch.stack(errors).max().item(), expected_bytes(tables, rank)  # NaN stays NaN
    held = sum(t.untyped_storage().nbytes() for name, t in w.items() if name.endswith(EXPERTS))
    formula = LAYERS * 3 * H * FF * E // P * 8
    wrong = [] if error <= 1e-10 else [f"K = {K}: rank {rank} is off by {error:.1e}"]  # NaN is not <= anything
    if (measured, held) != (expected, formula):
        wrong.append(f"K = {K}: rank {rank} sends {measured} and holds {held} bytes, not {expected} and {formula}")
    if rank == 0:
        show(tables[0], K)
        alive = min(mine[1][0][f"{i}.gate"].abs().max().item() for i in range(LAYERS))
        print(f"largest error {error:.1e}; the routers' gradients go up to {alive:.1e}")
        print(f"experts held: {held:,} bytes, formula {formula:,}, one process {formula * P:,}")
        print(f"sent in a step, bytes: {measured}, formula {expected}; {3 * sum(T) / seconds:,.0f} tokens/s\n")
    return wrong


def show(table: Tensor, K: int) -> None:
    """The dispatch table [P, E], with a bar between the experts of different ranks."""
    P, E = table.shape
    print(f"K = {K}, layer 0: rows of each rank (line) for each expert (column)")
    lines = {"": [f"e{e}" for e in range(E)], **{f"rank {r}": table[r].tolist() for r in range(P)}}
    for name, line in (lines | {"together": table.sum(0).tolist()}).items():
        parts = (line[r * E // P : (r + 1) * E // P] for r in range(P))
        print(f"{name:9}", " | ".join(" ".join(f"{n:>4}" for n in part) for part in parts))


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str):
        if os.environ.get("RANK", "0") == "0":
            print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
        sys.exit(2)


def main() -> int:
    parser = OneLineParser(description="Expert parallelism in one file", allow_abbrev=False)
    parser.add_argument("--top-k", type=int, help="experts of a token (default: 1, and then 2)")
    parser.add_argument("--experts", type=int, default=8, help="in each layer")
    args, P, gpus = parser.parse_args(), int(os.environ.get("WORLD_SIZE", "1")), torch.cuda.device_count()
    if not 1 <= args.experts <= 1024 or args.experts % P:
        parser.error(f"--experts {args.experts} cannot be shared evenly by {P} ranks; use a multiple of {P} up to 1024")
    ways = [k for k in (1, 2) if k <= args.experts] if args.top_k is None else [args.top_k]
    if not 1 <= ways[0] <= args.experts:
        parser.error(f"--top-k {args.top_k} of {args.experts} experts is impossible; use 1 to {args.experts}")
    if 0 < gpus < (local := int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
        parser.error(f"--nproc_per_node {local} is more than the GPUs here; use {gpus} or less")
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if gpus else "cpu"
    if gpus:
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(seconds=60), **alone)
    everyone: list[list[str]] = [[]] * P
    dist.all_gather_object(everyone, [line for K in ways for line in check(K, args.experts, dist.group.WORLD, device)])
    wrong = [line for lines in everyone for line in lines]  # a rank that is off makes all fail
    if dist.get_rank() == 0:
        print("FAIL: " + "; ".join(wrong) if wrong else "PASS")
    gc.collect()  # what refers to the group in a cycle must not outlive it
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
