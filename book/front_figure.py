"""The figure of the front page: what one of four ranks holds and sends, technique by technique.

    python book/front_figure.py            writes book/figures/shards.svg

The bars are the planner's bytes (plan_memory.py, plan_traffic.py): what a rank of the technique holds, over what one
process would hold for the same samples in a micro-batch; and what it sends in a step, over the longest bar.
"""

from pathlib import Path

from referees import Layout, LlamaConfig, MoEConfig, activations, flows, held, stage_layers

PAGE = Path(__file__).parent / "figures" / "shards.svg"
MODEL = LlamaConfig(vocab_size=49152, hidden=2048, layers=24, heads=32, kv_heads=8, intermediate=8192)
MIXTURE = MoEConfig(hidden=2048, intermediate=8192, experts=8, top_k=2)
COMMON = {"seq_len": 4096, "micro_batches": 4, "precision": "bf16"}

# name, layout of four ranks, mixture of experts?
ROWS = [
    ("data parallel", {"dp": 4}, None),
    ("ZeRO-1", {"dp": 4, "zero": 1}, None),
    ("ZeRO-2", {"dp": 4, "zero": 2}, None),
    ("ZeRO-3", {"dp": 4, "zero": 3}, None),
    ("tensor", {"tp": 4}, None),
    ("tensor + sequence", {"tp": 4, "sequence_parallel": True}, None),
    ("context: ring", {"ring": 4}, None),
    ("context: Ulysses", {"ulysses": 4}, None),
    ("pipeline, 1F1B", {"pp": 4}, None),
    ("experts (of a mixture)", {"dp": 4, "ep": 4}, MIXTURE),
]
COLUMNS = {
    "weights": "#0072b2",
    "gradients": "#d55e00",
    "optimizer states": "#009e73",
    "activations": "#cc79a7",
    "sent in a step": "#e69f00",
}
GREY = "#444444"
DARK = (  # on a dark page
    '<style>@media (prefers-color-scheme: dark) { [fill="#444444"] { fill: #c8c8c8 } '
    '[stroke="#444444"] { stroke: #c8c8c8 } }</style>'
)


def numbers(given: dict, moe: MoEConfig | None) -> dict[str, float]:
    """Bytes on the rank that comes after the first: in a pipeline a stage in the middle."""
    layout, rank = Layout(**COMMON | given), min(given.get("pp", 1) - 1, 1)
    layers = stage_layers(layout, MODEL.layers, rank)
    in_flight = min(layout.pp - rank, layout.micro_batches)
    kept = sum(sum(activations(MODEL, moe, layout, some).values()) for some in layers) * in_flight
    sent = sum(flow.wire for flow in flows(MODEL, moe, layout, rank))
    return {**held(MODEL, moe, layout, rank), "activations": kept, "sent in a step": sent}


def table() -> dict[str, dict[str, float]]:
    """Every bar as a part of its column's whole."""
    found = {name: numbers(given, moe) for name, given, moe in ROWS}
    most = max(row["sent in a step"] for row in found.values())
    for (name, _, moe), row in zip(ROWS, found.values(), strict=True):
        alone = numbers({}, moe) | {"sent in a step": most}
        found[name] = {column: row[column] / alone[column] for column in COLUMNS}
    return found


def drawing() -> str:
    left, wide, high, gap = 160, 118, 22, 14
    width, height = left + len(COLUMNS) * (wide + gap), 40 + len(ROWS) * high
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12" fill="{GREY}">\n{DARK}'
    ]
    for i, column in enumerate(COLUMNS):
        parts.append(f'<text x="{left + i * (wide + gap)}" y="20">{column}</text>')
    for j, (name, row) in enumerate(table().items()):
        y = 34 + j * high
        parts.append(f'<text x="{left - 10}" y="{y + 12}" text-anchor="end">{name}</text>')
        for i, (column, colour) in enumerate(COLUMNS.items()):
            x, part = left + i * (wide + gap), row[column]
            parts.append(f'<rect x="{x}" y="{y}" width="{wide}" height="14" fill="none" stroke="{GREY}"/>')
            parts.append(f'<rect x="{x}" y="{y}" width="{wide * min(part, 1):.0f}" height="14" fill="{colour}"/>')
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(drawing())
    for name, row in table().items():
        print(f"{name:24}" + "".join(f"{column} {part:6.1%}  " for column, part in row.items()))
