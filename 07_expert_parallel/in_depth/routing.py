"""Expert parallelism I, routing: which tokens go to which experts, and how to keep all experts busy.

Problem. A larger feed-forward layer is better, but slower. A mixture of experts avoids the conflict: of E
small feed-forward layers, the experts, each token uses K. Parameters grow with E, computation with K. The
rule that chooses the K must be trainable, and must not send all tokens to the same few experts.

Idea. A router, one matrix [E, H], gives each token a score per expert. The outputs of the K best are added,
weighted with the scores; through these weights, the gradient of the model's loss reaches the router.

    token x -> x·gate -> scores  .05 .40 .02 .08 .30 .15   -> top 2: experts 1 and 4, weights .40/.70 and .30/.70
                                                 y = .57 expert_1(x) + .43 expert_4(x)

    softmax   s = softmax(x·gate), the K largest, divided by their sum         Mixtral (2401.04088, section 2.1)
    sigmoid   s = sigmoid(x·gate), the K largest of s + b, weights from s      DeepSeek-V3 (2412.19437, eq. 12-16)
    nodes     only experts on the M nodes that look best                       DeepSeek-V3 (section 2.1.2)
    K = 1     the largest s, not divided by itself (that would be 1)           Switch (2101.03961, eq. 2)

Without a remedy the choice collapses: an expert chosen more learns more and is chosen more. Three remedies:
    balance loss   sum over e of f_e P_e:  f_e = E/(K T) · times e was chosen,  P_e = mean over the tokens of the score
                   divided by the sum of the token's E scores;  1 if all is even
                   (GShard 2006.16668; Switch 2101.03961, eq. 4-6; for any K: DeepSeekMoE 2401.06066, eq. 12-14)
    bias           b_e up a step if e had less than the mean, down if more; no loss, no gradient (2408.15664, alg. 1)
    capacity       an expert takes C = ceil(c K T/E) tokens and drops the others (GShard, section 2.2; Switch, eq. 3)
and the z-loss, mean of log²(sum of e^logit), which keeps logits small (ST-MoE 2202.08906, eq. 5).

T counts the tokens of ALL ranks of the micro-batch. With f_e from local counts, each rank would balance its
own tokens, and the sum of the losses would be another loss. So counts are summed over a group.

Run it:
    python routing.py                                             one rank, CPU or GPU
    torchrun --nproc_per_node 4 routing.py --router sigmoid       Gloo on CPU, NCCL on GPU
    torchrun --nproc_per_node 2 routing.py --nodes 4 --max-nodes 2
The last line is PASS, or the script exits with 1 and says which number is wrong.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _moe_demo import OneLineParser, Report, check_gpus, launch, text
from torch import Tensor

# Legend of shapes: T tokens of this rank, H hidden, E experts, K experts per token, P ranks of the group whose tokens
# are counted together, M nodes a token may use. A group of None is only this process.
ROUTERS = ("softmax", "sigmoid")
SIZES = (8, 2, 128)  # E, K and T of the demo
Group = dist.ProcessGroup | None

# ------------------------------------------------------------------------------------------------------- the routers


@dataclass(frozen=True)
class Routing:
    """Where T tokens go, and how much each expert counts."""

    experts: Tensor  # [T, K] int64, the best first
    weights: Tensor  # [T, K], with sum 1 if normalised; gradients flow through them
    probabilities: Tensor  # [T, E], the scores of all experts, divided by their sum; for the balance loss


def router_logits(x: Tensor, gate: Tensor) -> Tensor:
    """x [T, H], gate [E, H] -> [T, E], in fp32 or better, also under autocast.

    A choice is a comparison. In bf16, with two to three digits, experts tie or swap, and training suffers
    (Switch, section 2.4, "selective precision").
    """
    # --- exercise 7.21: logits in fp32, whatever x is and whatever autocast says ---
    with torch.autocast(x.device.type, enabled=False):
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), gate.to(wide))
    # --- end exercise ---


def limit_to_nodes(choice: Tensor, K: int, nodes: int, M: int) -> Tensor:
    """Scores [T, E] -> the same, with -inf for experts outside the M best nodes of each token.

    A node holds E/nodes consecutive experts. Its score is the sum of its best K/M scores: as many as a token
    would take from each of its nodes if it took evenly (DeepSeek-V3, section 2.1.2).
    """
    # --- exercise 7.22: at most M nodes for each token ---
    by_node = choice.unflatten(1, (nodes, -1))  # [T, E] -> [T, nodes, E/nodes]
    node_score = by_node.topk(K // M, dim=2).values.sum(2)  # [T, nodes]
    best = node_score.topk(M, dim=1).indices
    allowed = torch.zeros_like(node_score, dtype=torch.bool).scatter(1, best, True)
    return by_node.masked_fill(~allowed[..., None], -math.inf).flatten(1)
    # --- end exercise ---


def route(
    logits: Tensor,
    K: int,
    router: str = "softmax",
    bias: Tensor | None = None,
    nodes: int = 1,
    M: int = 1,
    normalise: bool | None = None,
    experts: Tensor | None = None,
) -> Routing:
    """logits [T, E] -> K experts for each token. `experts` [T, K]: take these, and only weigh them by the logits.

    Normalised weights are s / (sum of the chosen s). As a softmax over log s they cannot become 0/0 when all
    s underflow. For the softmax router log s is the logit, up to a constant that cancels. Other weights are
    s. None: normalise if K > 1, since with one expert s/s is 1 and has no gradient (`cannot_learn`). The bias
    affects the choice, never the weights: it says how busy an expert is, nothing about the token.
    """
    # --- exercise 7.23: choose by s + b, weigh by s ---
    log_s = F.logsigmoid(logits) if router == "sigmoid" else logits
    if experts is None:
        free = logits.detach()  # a choice has no gradient, so autograd need not save it
        choice = free.sigmoid() if router == "sigmoid" else free.softmax(-1)
        choice = choice if bias is None else choice + bias
        choice = limit_to_nodes(choice, K, nodes, M) if nodes > M else choice
        experts = choice.topk(K, dim=1).indices
    probabilities = log_s.softmax(-1)
    if normalise or (normalise is None and K > 1):
        weights = log_s.gather(1, experts).softmax(-1)
    else:
        weights = (log_s.exp() if router == "sigmoid" else probabilities).gather(1, experts)
    return Routing(experts, weights, probabilities)
    # --- end exercise ---


def cannot_learn(E: int, K: int, router: str = "softmax", normalise: bool | None = None) -> str | None:
    """Why the weights of `route` are 1 for any logits, without a gradient to the router; or None."""
    if K == 1 and normalise:
        return "top-k 1 with normalised weights: a score divided by itself is 1; use scores that are not normalised"
    if E == 1 and router == "softmax" and not normalise:
        return "a softmax over one expert is 1; use the sigmoid router, or more experts"
    return None


def check_routing(E: int, K: int, router: str = "softmax", nodes: int = 1, M: int = 1) -> None:
    """ValueError in one line that says what would fit."""
    if router not in ROUTERS:
        raise ValueError(f"router {router!r} is unknown; use {' or '.join(ROUTERS)}")
    if not 1 <= K <= E:
        raise ValueError(f"top-k {K} of {E} experts is impossible; use 1 to {E}")
    if nodes < 1 or E % nodes:
        fits = ", ".join(str(n) for n in range(1, E + 1) if E % n == 0)
        raise ValueError(f"nodes {nodes} do not divide {E} experts; use {fits}")
    if not 1 <= M <= nodes:
        raise ValueError(f"max-nodes {M} of {nodes} nodes is impossible; use 1 to {nodes}")
    if nodes > M and (K % M or E // nodes < K // M):
        fits = ", ".join(str(m) for m in range(1, nodes) if K % m == 0 and K // m <= E // nodes) or "no smaller number"
        raise ValueError(f"max-nodes {M} cannot share top-k {K} evenly over nodes of {E // nodes} experts; use {fits}")


# --------------------------------------------------------------------------------------------- balance: two losses


def expert_counts(experts: Tensor, E: int) -> Tensor:
    """How often each expert was chosen: [T, K] -> int64 [E]. `bincount` gives the same, but on a GPU the host
    waits for it, because the length of its result depends on the data."""
    flat = experts.flatten()
    return flat.new_zeros(E).scatter_add_(0, flat, torch.ones_like(flat))


def group_sum(mine: Tensor, group: Group) -> Tensor:
    """The sum over the ranks of the group, mainly of counts. A new tensor: `mine` is unchanged."""
    # --- exercise 7.24: counts of the whole group ---
    total = mine.clone()
    if group is not None:
        dist.all_reduce(total, group=group)
    return total
    # --- end exercise ---


def balance_loss(probabilities: Tensor, counts: Tensor, K: int) -> Tensor:
    """This rank's share of  sum over e of f_e P_e.  The shares of all ranks add up to it, without averaging.

    probabilities [T, E] of this rank, counts [E] of all ranks. f_e is a count without a gradient. P_e is a
    mean over the tokens of all ranks, so a rank adds the sum over its tokens, divided by the number of all.
    """
    # --- exercise 7.25: the loss as a sum over tokens, divided by the number of all tokens ---
    counts = counts.to(probabilities.dtype)  # integer division would give float32 for any model
    tokens = counts.sum() / K  # of all ranks; each counted K times
    f = counts * (len(counts) / (K * tokens))
    return (f * probabilities.sum(0)).sum() / tokens
    # --- end exercise ---


def z_loss(logits: Tensor, counts: Tensor, K: int) -> Tensor:
    """This rank's share of the mean of log²(sum over e of e^logit) over the tokens of all ranks."""
    return logits.logsumexp(-1).square().sum() * K / counts.sum()


# ------------------------------------------------------------------------------------- balance without a loss: a bias


def bias_step(counts: Tensor) -> Tensor:
    """-1, 0 or +1 for each expert (2408.15664, algorithm 1). counts [E] int64, of all tokens of the step.

    In integers, so that all ranks and all layouts agree on which load is exactly average.
    """
    # --- exercise 7.26: up for those who had less than the mean ---
    return torch.sign(counts.sum() - len(counts) * counts)
    # --- end exercise ---


def max_violation(counts: Tensor) -> float:
    """MaxVio of 2408.15664: how far the busiest expert is above the mean. 0 is even; E/K - 1 is all tokens to one."""
    return (counts.max() / counts.double().mean() - 1).item()


# -------------------------------------------------------------------------------------------------------- capacity


def capacity(tokens: int | Tensor, E: int, K: int, factor: float) -> int | Tensor:
    """How many of `tokens` tokens an expert takes: ceil(c K T/E). If `tokens` is a float64
    tensor, so is the result: no host wait."""
    room = factor * K * tokens / E
    return room.ceil() if isinstance(room, Tensor) else math.ceil(room)


def within_capacity(experts: Tensor, E: int, factor: float, group: Group) -> Tensor:
    """[T, K] bool: which choices fit. The same ones are dropped as if one process had all tokens.

    Each expert has one queue for the full group: first choices before second choices (GShard, algorithm 1),
    and within them the tokens of rank 0 before those of rank 1. For its place in the queue, a token needs
    only the number of earlier choices: K·E counts per rank are sent, but no scores.
    """
    K = experts.shape[1]
    every = torch.arange(E, device=experts.device)
    mine = (experts.T[..., None] == every).long().cumsum(1)  # [K, T, E]: k-th choices that are e, up to this token
    here = mine[:, -1] if len(experts) else mine.new_zeros(K, E)  # [K, E]
    # --- exercise 7.27: the place of a choice in the queue of its expert, over all ranks ---
    P, rank = (dist.get_world_size(group), dist.get_rank(group)) if group is not None else (1, 0)
    everyone = [torch.empty_like(here) for _ in range(P)]
    if P > 1:
        dist.all_gather(everyone, here.contiguous(), group=group)
    else:
        everyone = [here]
    by_rank = torch.stack(everyone)  # [P, K, E]
    before = by_rank[:rank].sum(0)  # k-th choices on the ranks before this one
    better = by_rank.sum(0).cumsum(0) - by_rank.sum(0)  # [K, E]: all choices better than the k-th
    place = mine - 1 + (before + better)[:, None]  # [K, T, E]
    place = place.gather(2, experts.T[..., None])[..., 0].T  # [T, K]
    return place < capacity(by_rank[:, 0].sum().double(), E, K, factor)  # no host wait
    # --- end exercise ---


# ------------------------------------------------------------------------------------------------------------- demo


def chosen_one_by_one(logits: Tensor, K: int, router: str, bias: Tensor, nodes: int, M: int) -> list[list[int]]:
    """The reference: for each token, sort nodes, then experts, in plain Python."""
    result = []
    for row in logits.tolist():
        largest = max(row)
        if router == "sigmoid":
            s = [1 / (1 + math.exp(-v)) + b for v, b in zip(row, bias.tolist(), strict=True)]
        else:
            s = [math.exp(v - largest) / sum(math.exp(u - largest) for u in row) for v in row]
        size = len(s) // nodes
        goodness = [sum(sorted(s[n * size : (n + 1) * size])[-(K // M) :]) for n in range(nodes)]
        best = sorted(range(nodes), key=lambda n: -goodness[n])[:M]
        result.append(sorted((e for e in range(len(s)) if e // size in best), key=lambda e: -s[e])[:K])
    return result


def demo(args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Route real text, different on each rank, and compare with one process that has all of it."""
    rank = dist.get_rank(group)
    P = dist.get_world_size(group)
    E = args.experts
    K = args.top_k
    H = 32
    report = Report(group)
    T = args.tokens
    generator = torch.Generator().manual_seed(0)
    table, gate = (torch.randn(n, H, generator=generator, dtype=torch.float64) for n in (256, E))
    gate[0] += 0.5  # a skewed start: expert 0 scores high
    whole = F.rms_norm(table[text(1, P * T)[0]] + 0.3, (H,)).to(device)  # [P·T, H], the tokens of all ranks
    x = whole[rank * T : (rank + 1) * T]
    steps = torch.zeros(E, dtype=torch.int64, device=device)
    use_bias = args.router == "sigmoid"

    normalise = {"yes": True, "no": False}.get(args.normalise)

    def choose(tokens: Tensor, steps: Tensor) -> tuple[Tensor, Routing]:
        logits = router_logits(tokens, gate.to(device))
        bias = 0.01 * steps if use_bias else None
        return logits, route(logits, K, args.router, bias, args.nodes, args.max_nodes, normalise)

    logits, mine = choose(x, steps)
    all_logits, everyone = choose(whole, steps)
    counts = group_sum(expert_counts(mine.experts, E), group)
    report.title(f"{P} rank(s) with {T} tokens each, {args.router} router, {K} of {E} experts")
    nodes = args.nodes if args.nodes > args.max_nodes else 1
    want = chosen_one_by_one(logits, K, args.router, torch.zeros(E), nodes, args.max_nodes if nodes > 1 else 1)
    differ = (mine.experts != torch.tensor(want, device=device)).any(1).sum().item()
    report.add("tokens whose experts differ from a choice one by one", 0, differ)
    most = max(len(set(row)) for row in (mine.experts // (E // args.nodes)).tolist())
    report.add("nodes of a token, at most", f"<= {args.max_nodes}", most, most <= args.max_nodes or nodes == 1)
    report.add("choices counted over all ranks, P·T·K", P * T * K, int(counts.sum()))
    share = balance_loss(mine.probabilities, counts, K)
    shares = torch.stack((share, z_loss(logits, counts, K)))
    dist.all_reduce(shares, group=group)  # to compare; training needs each rank's share only
    everywhere = expert_counts(everyone.experts, E)
    report.compare(shares[0], balance_loss(everyone.probabilities, everywhere, K))
    report.compare(shares[1], all_logits.logsumexp(-1).square().mean())
    report.add_errors("balance loss and z-loss: sum of shares against one process")
    free = logits.clone().requires_grad_()
    one_by_one = torch.arange(1, K + 1, device=device)  # a loss that prefers the last of a token's experts
    (route(free, K, args.router, normalise=normalise).weights * one_by_one).sum().backward()
    alive = free.grad.abs().max().item()
    stuck = cannot_learn(E, K, args.router, normalise)
    right = alive <= 1e-12 if stuck else alive > 1e-6
    report.add("the router's gradient through the weights", "0" if stuck else "> 0", f"{alive:.1e}", right)
    if stuck and rank == 0:
        print(f"  warning: the router does not learn: {stuck}")
    kept = within_capacity(mine.experts, E, args.capacity, group)
    alone = within_capacity(everyone.experts, E, args.capacity, None)[rank * T : (rank + 1) * T]
    report.add("choices dropped here: as in one process", (~alone).sum().item(), (~kept).sum().item())
    report.add("  and they are the same", 0, (kept != alone).sum().item())
    if use_bias:
        before = max_violation(counts)
        for _ in range(100):
            _, mine = choose(x, steps)
            counts = group_sum(expert_counts(mine.experts, E), group)
            steps += bias_step(counts)
        after = max_violation(counts)
        # It falls at the default sizes. It need not with many experts for few tokens, or if all are chosen.
        judged = (E, K, T) == SIZES
        bound = f"< {before:.2f}" if judged else f"was {before:.2f}"
        report.add("MaxVio after 100 steps of the bias", bound, f"{after:.2f}", after < before or not judged)
    return report.finish()


def main() -> None:
    parser = OneLineParser(description="Routers of a mixture of experts, and their balance.", allow_abbrev=False)
    parser.add_argument("--router", choices=ROUTERS, default="softmax")
    parser.add_argument("--experts", type=int, default=SIZES[0])
    parser.add_argument("--top-k", type=int, default=SIZES[1])
    parser.add_argument(
        "--normalise", choices=("yes", "no"), help="divide by the chosen scores' sum; default: if K > 1"
    )
    parser.add_argument("--nodes", type=int, default=1, help="nodes that the experts lie on")
    parser.add_argument("--max-nodes", type=int, default=1, help="nodes that a token may use")
    parser.add_argument("--capacity", type=float, default=1.0, help="capacity factor")
    parser.add_argument("--tokens", type=int, default=SIZES[2], help="tokens of each rank")
    args = parser.parse_args()
    parser.check_range(args, experts=(1, 1024), top_k=(1, 1024), nodes=(1, 1024), tokens=(1, 4096))
    try:
        check_routing(args.experts, args.top_k, args.router, args.nodes, args.max_nodes)
    except ValueError as error:
        parser.error(f"--{error}")
    if not 0 < args.capacity < math.inf:
        parser.error(f"--capacity {args.capacity} leaves no room; use a positive number")
    check_gpus(parser)
    launch(lambda group, device: demo(args, group, device))


if __name__ == "__main__":
    main()
