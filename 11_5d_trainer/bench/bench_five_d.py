"""five_d.py's step beside the trainer's own, which has the same layout and the same weights; and who holds what.

    python 11_5d_trainer/bench/bench_five_d.py             CPU, 4 ranks, and 8 for the figure
    python 11_5d_trainer/bench/bench_five_d.py --figures   draw the figure again from results/

First both make three steps of plain SGD from the same weights on the same batches in float64, and losses and norms must
agree to 1e-10; only then is a step timed, in pairs. A ratio above 1 means that five_d.py takes longer.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import chapters  # noqa: F401  finds the chapters below
import five_d
import model
import rank as trainer
import torch
import torch.distributed as dist
import train
from harness.figures import COLOURS, GREY, write_figure
from harness.ranks import run_ranks
from harness.report import Ratio, paired, write_result
from llama import LlamaConfig

SIZES = five_d.Config(4, 64, 8, 4, 160, 0, 0, 64, 16, 4, torch.float64)
OPTIONS = "--device cpu --seq-len 64 --global-batch 16 --precision fp64 --clip 1.0 --zero 1"
LAYOUTS = {  # of five_d.py: pp, cp, tp; and of the trainer
    "data 4": ((1, 1, 1), ""),
    "data 2 x tensor 2": ((1, 1, 2), "--tp 2 --sequence-parallel"),
    "data 2 x context 2": ((1, 2, 1), "--cp 2 --cp-kind zigzag"),
    "data 2 x pipeline 2": ((2, 1, 1), "--pp 2 --schedule 1f1b"),
    "pipeline 2 x tensor 2": ((2, 1, 2), "--pp 2 --schedule 1f1b --tp 2 --sequence-parallel"),
}


def their_name(name):
    layer, _, kind = name.rpartition(".")
    if not layer:
        return {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}[kind] + ".weight"
    inside = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    inside |= {x: f"self_attn.{x}_proj" for x in "qkvo"} | {x: f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    return f"model.layers.{layer}.{inside[kind]}.weight"


def sgd(model, lr):
    return torch.optim.SGD([{"params": list(model.parameters()), "weight_decay": 0.0}], lr=0.1)


def beside_the_trainer(layout, words):
    """Losses and norms of both, then how long a step takes, five_d.py's against the trainer's."""
    pp, cp, tp = layout
    c = SIZES
    mesh = five_d.Mesh(list(range(dist.get_world_size())), pp, cp, tp, 1)
    words = [*words.split(), "--micro-batch", str(c.batch // (mesh.dp * c.micro_batches))]
    options = train.prepare(words, dist.get_world_size()).config
    sizes = LlamaConfig(256, c.hidden, c.layers, c.heads, c.kv_heads, c.inner)
    me = trainer.make_rank(options, sizes, torch.device("cpu"), sgd)
    first = dict(model.alone(sizes).double().named_parameters())
    whole = {name: first[their_name(name)].detach() for name in five_d.whole_weights(c)}
    lines = five_d.make_lines(five_d.my_pieces(whole, c, mesh), mesh)
    optimizer, both = torch.optim.SGD([line.shard for line in lines], lr=0.1), []
    data = torch.frombuffer(bytearray(Path(five_d.__file__).read_bytes()), dtype=torch.uint8).long()
    for step in range(3):
        tokens, labels = five_d.batch_of(data, step, c, prompts=True)
        mine = (x.chunk(mesh.dp)[mesh.dp_rank].chunk(c.micro_batches) for x in (tokens, labels))
        theirs, ours = list(zip(*mine, strict=True)), five_d.cut(tokens, labels, c, mesh)
        run_ours = partial(five_d.train_step, ours, lines, optimizer, 1.0, c, mesh)
        run_theirs = partial(trainer.train_step, me, theirs)
        both.append((run_ours(), run_theirs()))
    error = max((abs(a - b) for pair in both for a, b in zip(*pair, strict=True)), key=lambda e: (e != e, e))
    if not error <= 1e-10:
        raise SystemExit(f"{layout}: five_d.py and the trainer differ by {error:.1e}")
    ratio = paired(run_ours, run_theirs, setup=dist.barrier)
    return error, (ratio.median, ratio.low, ratio.high)


def place(layout):
    """What this rank of a layout with all five axes has."""
    pp, cp, tp, ep = layout
    c = five_d.TINY._replace(length=32)
    mesh = five_d.Mesh(list(range(dist.get_world_size())), pp, cp, tp, ep)
    layers = list(five_d.layers_of(mesh.stage, c, mesh))
    name = f"{layers[0]}.w1"
    pieces, piece, _ = five_d.place_of(name, c, mesh)
    experts = list(range(c.experts))[piece * c.experts // pieces : (piece + 1) * c.experts // pieces]
    heads = list(range(mesh.tp_rank * c.heads // tp, (mesh.tp_rank + 1) * c.heads // tp))
    mine = five_d.positions_of(c.length, mesh).chunk(tp)[mesh.tp_rank].tolist()
    return layers, heads, experts, mine


def measure_speed():
    rows = []
    for name, (layout, words) in LAYOUTS.items():
        error, ratio = run_ranks(4, beside_the_trainer, layout, f"{OPTIONS} {words}", timeout=120)[0]
        rows.append([name, error, Ratio(*ratio)])
    write_result(
        "11_five_d",
        "five_d.py beside the trainer, 4 ranks, dense, ZeRO-1",
        ["layout", "largest difference of losses and norms", "seconds of a step / the trainer's (quartiles)"],
        rows,
        f"{SIZES.layers} layers of hidden size {SIZES.hidden} in float64, {SIZES.batch} x {SIZES.length} tokens a step "
        f"in {SIZES.micro_batches} micro-batches, plain SGD. Three steps were compared first.",
    )


def measure_places():
    places = run_ranks(8, place, (2, 2, 2, 2))
    kinds = ("layers", "heads", "experts", "tokens")
    write_result(
        "11_five_d_mesh",
        "Who holds what: pp 2 x cp 2 x tp 2, ep 2 on 8 ranks",
        ["rank", *kinds],
        [[rank, *(" ".join(map(str, some)) for some in held)] for rank, held in enumerate(places)],
        "4 layers, 8 query heads, 4 experts, a sequence of 32 tokens. Tokens are those between the matrices.",
    )


def draw(axes, result):
    """A row for each rank; what it holds of the layers, heads, experts and of a sequence."""
    ranks, begin, ticks = len(result["rows"]), 0, []
    for column, kind in enumerate(result["columns"][1:], 1):
        held = [[int(x) for x in row[column].split()] for row in result["rows"]]
        size = 1 + max(x for some in held for x in some)
        width = 1 / size
        for rank, some in enumerate(held):
            axes.barh(rank, 1, 0.8, left=begin, color="none", edgecolor=GREY, linewidth=0.5)
            for x in some:
                colour = COLOURS["activations" if kind == "tokens" else "weights"]
                axes.barh(rank, width, 0.8, left=begin + x * width, color=colour)
        ticks.append((begin + 0.5, f"{size} {kind}"))
        begin += 1.15
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_xticks([x for x, _ in ticks], [words for _, words in ticks])
    axes.set(ylim=(ranks - 0.5, -0.5), xlim=(-0.02, begin - 0.13))
    axes.grid(False)


def figures():
    write_figure("11_5d_trainer/figures/five_d.svg", ["11_five_d_mesh"], draw, size=(9, 3.6))


if __name__ == "__main__":
    if "--figures" not in sys.argv:
        measure_speed()
        measure_places()
    figures()
