"""What the meter says is what was sent, and what was sent is what the chapters' formulas say, to the byte."""

import contextlib
import dataclasses
import io
import json
import math
import re
import statistics
import sys
from pathlib import Path
from unittest import mock

import checkpoint
import curve
import fuzz
import generate
import metrics
import plan_memory
import pytest
import step as step_module
import torch
import torch.distributed as dist
import train
import training_step
from data import load_corpus
from harness.meter import communication, held_bytes
from harness.ranks import run_ranks
from layouts import BOTH_WAYS, SIZES, SPLIT, Layout, covering, options
from llama import LlamaConfig
from model import alone, full_shapes
from moe_layer import MoEConfig, moe_layers
from moe_llama import gather_experts
from options import Config, UsageError, parse
from plan_traffic import flows, passes_of
from rehearse_rank import built
from sources import Tokenizer
from test_train import SMALL, arguments, losses, run, train_on
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

LAYOUTS = [
    (2, ""),
    (3, "--global-batch 12 --zero 1"),
    (2, "--zero 3"),
    (4, "--tp 4 --sequence-parallel"),  # 2 K/V heads on 4 ranks
    (4, "--cp 4 --cp-kind ulysses"),  # 2 K/V heads
    (2, "--cp 2 --cp-kind allgather"),
    (4, "--cp 4 --cp-kind usp --micro-batch 4"),
    (2, "--pp 2 --schedule 1f1b --tied"),
    (4, "--pp 2 --schedule zb-h1 --tp 2 --sequence-parallel"),
    (4, "--pp 2 --schedule dualpipe --micro-batch 1 --zero 1"),
    (2, "--pp 2 --schedule zb-v --stages-per-rank 2"),
    (4, "--experts 4 --ep 2 --tp 2 --sequence-parallel --zero 1"),
    (4, "--experts 4 --ep 2 --pp 2 --capacity 1.0"),
    (2, "--experts 4 --ep 2 --dispatch once"),
    (4, "--experts 4 --ep 2 --dispatch fixed --capacity 1.0"),
    (4, "--experts 4 --ep 2 --zero 2 --cp 2 --cp-kind ring"),
    (3, "--cp 3 --cp-kind ulysses --seq-len 18 --global-batch 6"),  # 2 K/V heads on 3 ranks: 1, 2 and 1 of them
    (2, "--zero 2 --zero-offload --precision bf16-master --accumulate-dtype fp32"),
    (4, "--zero 2 --zero-offload --tp 2"),
    (2, "--zero 1 --zero-late-gather"),
    (4, "--zero 3 --zero-shards 2"),
    (4, "--zero 1 --zero-shards 2 --cp 2 --cp-kind zigzag"),
    (2, "--zero 1 --precision bf16-master --accumulate-dtype fp32"),
    (2, "--zero 2 --precision bf16-master --reduce-dtype fp32 --accumulate-dtype fp32"),
    (2, "--tp 2 --sequence-parallel --tp-overlap"),
    (4, "--pp 2 --schedule zb-h1 --tp 2 --tp-overlap"),
    (2, "--tp 2 --sequence-parallel --tp-overlap domino"),
    (4, "--cp 4 --cp-kind usp --micro-batch 4 --recompute selective"),
    (3, "--cp 3 --cp-kind ulysses --seq-len 18 --global-batch 6 --recompute full"),
    (4, "--tp 2 --sequence-parallel --tp-overlap --recompute full --zero 3"),
    (4, "--experts 4 --ep 2 --zero 2 --recompute full"),
    (2, "--cp 2 --cp-kind ulysses --fpdt-chunks 2 --zero 3"),
]


def one_step(words, sizes):
    """One step of the trainer under its own meter and under that of the tests."""
    me, batches = fuzz.made(words, LlamaConfig(**sizes))
    looker = metrics.Watch(me, None, first=0)
    for owner in metrics.offloaded(me):
        owner.link.bytes["up"] += 7  # of a state that was loaded: they are not of the step
    with looker.step(0), communication() as sent:
        step_module.train_step(me, batches())
    step_module.wait_for_weights(me)
    mine = looker.ranks[dist.get_rank()]
    told = held_bytes([*me.model.parameters()]) if me.config.zero == 0 else None
    return mine, sent.total, told


@pytest.mark.always(
    "4---experts 4 --ep 2 --tp 2 --sequence-parallel --zero 1",
    "2---zero 2 --zero-offload --precision bf16-master --accumulate-dtype fp32",
    "2---zero 2 --precision bf16-master --reduce-dtype fp32 --accumulate-dtype fp32",
    "4---zero 1 --zero-shards 2 --cp 2 --cp-kind zigzag",
    "4---cp 4 --cp-kind usp --micro-batch 4 --recompute selective",
)
@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS, ids=lambda value: str(value) or "plain")
def test_bytes_held_and_sent_on_each_axis_are_those_of_the_formulas(ranks, layout, text):
    sizes = SMALL | {"layers": 4 if "--pp" in layout else 2, "tied": "--tied" in layout}
    sizes |= {"heads": 6, "hidden": 36} if "--cp 3" in layout else {}
    sizes |= {"qkv_bias": True, "qk_norm": True, "own_head_dim": 12} if "--tp 2" in layout or "usp" in layout else {}
    everyone = run_ranks(ranks, one_step, [*arguments(text, eval_samples=1), *layout.split()], sizes)
    axes = set()
    for rank, (mine, total, told) in enumerate(everyone):
        for what in ("held", "sent", "crossed"):
            for kind, (got, want) in mine[what].items():
                assert math.isclose(got, want, rel_tol=1e-12), (
                    f"{what} {kind} on rank {rank}: {got:,.2f}, but should be {want:,.2f}"
                )
        assert not mine["not counted"]
        sent = sum(got for got, _ in mine["sent"].values())
        assert math.isclose(sent, total, rel_tol=1e-12), f"rank {rank}: all axes {sent:,.2f}, the harness {total:,.2f}"
        axes |= {axis for axis, (got, _) in mine["sent"].items() if got}
        assert all((mine["crossed"][way][0] > 0) == ("offload" in layout) for way in ("down", "up"))
        if told:
            assert (told.parameters, told.gradients) == (mine["held"]["weights"][0], mine["held"]["gradients"][0])
    assert "other" not in axes and ("--zero-shards" in layout) == ("copies" in axes)
    for option, axis in (("--tp", "tp"), ("--pp", "pp"), ("--ep", "ep"), ("ulysses", "ulysses"), ("zigzag", "ring")):
        assert (option in layout) <= (axis in axes), f"nothing was sent on {axis}"


def has_no_formula(config):
    """What the docstring of metrics.py leaves out, of the options that `covering` has."""
    split = config.schedule in (*SPLIT, *BOTH_WAYS)
    return config.recompute == "full" and config.pp > 1 and (split if config.experts else config.tp > 1)


@pytest.mark.prove
@pytest.mark.parametrize("part", range(4))
def test_recomputed_or_in_chunks_every_two_kinds_of_parallelism_send_what_the_formulas_say(part, text):
    layouts = covering(pairs=False, triples=False, most=4)[0]
    again = [one for one in layouts if "--recompute" in one.words or "--fpdt" in one.words]
    assert len(again) >= 8
    for one in again[part::4]:
        words = options(text, one.words, eval_samples=1)
        config = Config(**parse(words))
        for rank, (mine, total, _) in enumerate(run_ranks(one.ranks, one_step, words, vars(SIZES))):
            unknown = [axis for axis, (_, want) in mine["sent"].items() if want is None]
            assert bool(unknown) == has_no_formula(config), f"{one}: no formula for {unknown}"
            for axis, (got, want) in mine["sent"].items():
                right = want is None or math.isclose(got, want, rel_tol=1e-12)
                assert right, f"{one}: {axis} on rank {rank}: {got:,.2f}, but should be {want:,.2f}"
            sent = sum(got for got, _ in mine["sent"].values())
            assert math.isclose(sent, total, rel_tol=1e-12), f"{one}: {sent:,.2f}, the harness {total:,.2f}"


def counted_as_planned(cases):
    """Axes that send something. Compared are bytes held of every rank; of those sent the axes that metrics.py counts by
    itself, in the mean of a stage's ranks, with an even load of the experts."""
    seen = set()
    for one, changes in cases:
        config = Config(**parse(options("", one.words)))
        sizes = dataclasses.replace(SIZES, tied=config.tied, **changes)
        layout, moe = plan_memory.Layout.of(config, sizes, one.ranks), config.mixture(sizes)
        sent: dict[tuple[int, str], list[float]] = {}
        for rank in range(one.ranks):
            with built(config, sizes, rank, one.ranks) as (me, _):
                stage, P = me.mesh.place["pp"], me.mesh.size("ep")
                held = plan_memory.held(sizes, moe, layout, stage)
                assert [*metrics.held_by_formula(me).values()] == [*held.values()], f"{one}, rank {rank}"
                calls = sum(len(layers) * times for _, layers, times in passes_of(sizes, layout, stage))
                even = [moe.top_k * layout.outer_tokens // P] * P if moe else []
                for axis, count in metrics.sent_by_formula(me, [(even, even)] * calls if moe else []).items():
                    if axis in metrics.BUILT and count is not None:
                        sent.setdefault((stage, axis), []).append(count)
        for (stage, axis), counts in sent.items():
            want = sum(flow.wire for flow in flows(sizes, moe, layout, stage) if flow.axis == axis)
            assert math.isclose(sum(counts) / len(counts), want, rel_tol=1e-12), f"{one}, stage {stage}: {axis}"
            seen |= {axis} if want else set()
    return seen


@pytest.mark.prove
def test_what_is_counted_on_a_built_model_is_what_is_planned_without_one():
    six = {"heads": 6, "hidden": 24}
    cases = [(one, {}) for one in covering(pairs=False, triples=False, most=8)[0]]
    cases += [(Layout(4, "--experts 4 --ep 2 --zero 1"), {}), (Layout(4, "--cp 4 --cp-kind usp"), {})]
    cases += [(Layout(4, "--cp 4 --cp-kind usp"), six | {"kv_heads": 3})]  # 3 query and 2 K/V heads on a rank
    cases += [(Layout(3, "--cp 3 --cp-kind ulysses --seq-len 18 --global-batch 6"), six)]  # 1, 2 and 1 K/V heads
    assert counted_as_planned(cases) == set(metrics.BUILT)


def test_what_is_counted_of_a_ring_and_of_a_pipeline_with_zero_is_what_is_planned():
    both_ways = "--pp 2 --schedule dualpipe --micro-batch 1 --zero 2"
    for words, axes in (("--cp 2 --cp-kind ring --recompute full --zero 3", {"ring", "data"}), (both_ways, {"data"})):
        assert counted_as_planned([(Layout(2, words), {})]) == axes
    config, sizes = Config(**parse(options("", f"{both_ways} --tied"))), dataclasses.replace(SIZES, tied=True)
    with built(config, sizes, 0, 2) as (me, _):
        assert me.model.shared == set(), "this rank has both ends, so nobody else a part of the gradient"


def listened(words):
    """A run, and what it said."""
    said: list[str] = []
    with mock.patch.object(train.Logger, "say", lambda logger, text: said.extend(text.splitlines())):
        log, _ = run(words, SMALL)
    return log, said


@pytest.mark.prove
def test_the_table_is_printed_once_with_a_sign_that_both_agree_and_kept_rank_by_rank(text, tmp_path):
    words = [*arguments(text, steps=3), "--meter", "--tp", "2", "--zero", "1", "--out", str(tmp_path / "run")]
    _, said = run_ranks(4, listened, words)[0]
    assert sum(line.startswith("bytes of a rank ") for line in said) == 1
    rows = [line for line in said if line.startswith(("held ", "sent ")) and "in a step" not in line]
    assert [line.split()[1] for line in rows] == [
        *("weights", "gradients", "optimizer", "tp", "batch", "replica", "data", "world")
    ]
    assert all(" = " in line for line in rows), rows
    ranks = json.loads((tmp_path / "run" / "meter.json").read_text())
    assert len(ranks) == 4 and all(rank["sent"]["tp"][0] > 0 for rank in ranks)


def test_the_sign_of_a_row_is_that_of_all_ranks():
    watch = object.__new__(metrics.Watch)
    for pairs, sign in {
        ((8, 8), (5, 5)): "=",
        ((8, 8), (5, 4)): "≠",
        ((8, 7), (5, 5)): "≠",
        ((8, 8), (5, None)): "no",
    }.items():
        for order in (pairs, pairs[::-1]):  # the rank with most may be any
            rest = {"sent": {"other": (0.0, 0.0)}, "crossed": {}, "not counted": []}
            watch.ranks = [{"held": {"weights": pair}, **rest} for pair in order]
            _, row = watch.report().splitlines()
            want = "formula" if sign == "no" else str(dict(pairs)[8])  # of the rank with most
            assert row.split()[2:5] == ["8", sign, want] and int(row.split()[-1]) == sum(got for got, _ in pairs), row
    watch.ranks[0]["not counted"] = ["c10d::scatter_"]
    assert watch.report().endswith("\nnot counted: c10d::scatter_")
    assert (metrics.text(9999), metrics.text(10_000)) == ("9,999 B", "0.01 MB")
    assert 2**26 < metrics.peak_memory(torch.device("cpu")) < 2**40, "bytes"


def test_a_board_hears_what_a_line_of_the_log_knows_and_one_that_does_not_begin_ends_nothing(monkeypatch, capsys):
    watch, board = object.__new__(metrics.Watch), object.__new__(metrics.TensorBoard)
    board.writer = mock.Mock()
    watch.boards = [board]
    watch.note({"step": 3, "loss": 0.0, "mfu": None})
    board.writer.add_scalar.assert_called_once_with("loss", 0.0, 3)
    monkeypatch.setattr(metrics.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(metrics.dist, "all_gather_object", lambda found, mine: found.__setitem__(0, mine))
    watch.first, watch.me = 4, mock.Mock(device=torch.device("cpu"))  # it was resumed
    watch.ranks = [{"sent": {"ep": (size, 0)}} for size in (1, 3)]
    lines = [{"step": n, "loss": 1.0, "tokens_per_s": 10 * n, "mfu": n / 10} for n in range(1, 8)]
    assert re.search(r"(?s) 65 tokens/s \(median\), MFU 65\.0%\n.*\nsent in a step  ep 3 B$", watch.summary(lines))
    monkeypatch.setattr(metrics, "TensorBoard", mock.Mock(side_effect=OSError("no network"), __name__="TensorBoard"))
    assert metrics.boards(Config(), None) == [] and not capsys.readouterr().err
    assert metrics.boards(Config(tensorboard=True), None) == []
    assert capsys.readouterr().err == "TensorBoard does not begin (no network); the run goes on without it\n"


@pytest.mark.prove
@pytest.mark.parametrize(
    ("axis", "layout"),
    [("tp", "--precision bf16 --tp 2"), ("ep", "--experts 4 --ep 2 --dispatch once --recompute full")],
)
def test_where_no_formula_holds_the_table_says_so_and_still_counts(axis, layout, text, tmp_path):
    words = [*arguments(text, steps=1, warmup=0), "--meter", *layout.split()]
    _, said = run_ranks(2, listened, [*words, "--out", str(tmp_path / "run")])[0]
    [row] = [line for line in said if line.startswith(f"sent {axis} ")]
    assert row.split()[-3:-1] == ["no", "formula"] and int(row.split()[-1].replace(",", "")) > 0
    assert not any("≠" in line for line in said)


@pytest.mark.prove
def test_the_meter_and_the_trace_change_no_loss_and_the_trace_has_the_steps_asked_for(text, tmp_path):
    words = [*arguments(text, steps=4), "--tp", "2"]
    plain, _ = train_on(2, [*words, "--out", str(tmp_path / "plain")])
    watched, _ = train_on(2, [*words, "--meter", "--profile", "2", "--out", str(tmp_path / "watched")])
    assert losses(plain) == losses(watched)
    for rank in range(2):
        events = json.loads((tmp_path / "watched" / f"trace-rank{rank}.json").read_text())["traceEvents"]
        names = [event.get("name", "") for event in events]
        assert sum(name == "aten::mm" for name in names) > 10
        assert sum(name == "c10d::allreduce_" for name in names) > 10
        assert sum(name.startswith("step ") for name in names) == 2


@pytest.mark.prove
def test_a_trace_of_more_steps_than_there_are_ends_with_the_run(text, tmp_path):
    train_on(1, [*arguments(text, steps=3), "--profile", "9", "--out", str(tmp_path / "run")])
    assert json.loads((tmp_path / "run" / "trace-rank0.json").read_text())["traceEvents"]


@pytest.mark.prove
def test_a_resumed_run_is_metered_too(text, tmp_path):
    _, folder = train_on(2, [*arguments(text, keep=9), "--out", str(tmp_path / "run")])
    _, said = run_ranks(2, listened, ["--resume", f"{folder}/checkpoints/step-000004", "--meter"])[0]
    rows = [line for line in said if line.startswith(("held ", "sent ")) and "in a step" not in line]
    assert len(rows) > 5 and all(" = " in line for line in rows)


def listened_with_peaks(argv):
    with mock.patch.object(metrics, "peak_memory", lambda device: (1 + dist.get_rank()) * 2**30):
        return listened(argv)


def test_the_summary_tells_loss_speed_memory_and_bytes_per_axis(text, tmp_path):
    argv = [*arguments(text, steps=3), "--tp", "2", "--out", str(tmp_path / "run")]
    log, said = run_ranks(2, listened_with_peaks, argv)[0]
    at = next(i for i, line in enumerate(said) if line.startswith("loss  "))
    (loss, speed, memory, sent), last = said[at : at + 4], said[-1]
    assert f"{log[-2]['loss']:.4f} at the last step" in loss
    median = statistics.median(line["tokens_per_s"] for line in log if "loss" in line and line["step"] > 1)
    assert f" {median:,.0f} tokens/s (median), MFU n/a" in speed and " 2,048 MiB on the rank with most" in memory
    # 4 micro-batches: 4 L + 2 all-reduces of [2, 16, 32] in float64, and three numbers for each of 32 tokens.
    tp = 4 * ((4 * 2 + 2) * 2 * 16 * 32 * 8 + 3 * 32 * 8)
    assert sent.split(maxsplit=4)[4] == f"tp {tp / 1e6:.2f} MB, world 8 B"
    first, end = log[0]["val_loss"], log[-1]["val_loss"]
    bits = f"({end / math.log(2):.3f} bits per byte) after 3 steps, "
    assert last.startswith(f"validation loss {first:.3f} -> {end:.3f} nats per token {bits}"), last
    drawn = curve.in_terminal(log).splitlines()
    assert said[-1 - len(drawn) : -1] == drawn
    assert (tmp_path / "run" / "loss.svg").read_text() == curve.as_svg(log, "run")


def test_tensorboard_is_an_extra_and_its_absence_is_told_in_one_line(text, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(
        UsageError, match=r"^--tensorboard needs tensorboard; pip install tensorboard, or leave it out$"
    ):
        train.prepare([*arguments(text), "--tensorboard"], 1)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"^--wandb needs wandb; pip install wandb, or leave it out$"):
        train.prepare([*arguments(text), "--wandb", "mine"], 1)


WANDB = """
import json, pathlib
def init(**about):
    global file
    file = (pathlib.Path(about["dir"]) / "told.jsonl").open("a")
    print(json.dumps(about), file=file)
    return Run()
class Run:
    def define_metric(self, names, step_metric): print(json.dumps([names, step_metric]), file=file)
    def log(self, line): print(json.dumps(line), file=file)
    def finish(self): file.close()
"""


def run_with_wandb(words, folder):
    sys.path.insert(0, folder)
    try:
        return run(words, SMALL)
    finally:
        sys.path.remove(folder)
        sys.modules.pop("wandb", None)


@pytest.mark.prove
def test_weights_and_biases_hears_every_line_and_a_resumed_run_goes_on_under_its_id(text, tmp_path):
    (tmp_path / "wandb.py").write_text(WANDB)
    words = [*arguments(text, keep=9), "--wandb", "mine", "--out", str(tmp_path / "run")]
    log, folder = run_ranks(2, run_with_wandb, words, str(tmp_path))[0]
    run_ranks(2, run_with_wandb, ["--resume", f"{folder}/checkpoints/step-000004"], str(tmp_path))
    told = [json.loads(line) for line in (tmp_path / "run" / "told.jsonl").read_text().splitlines()]
    first, second = (line for line in told if "project" in line)
    assert (first["project"], first["name"], first["config"]["steps"]) == ("mine", "run", 8)
    assert second["id"] == first["id"] and len(first["id"]) == 8
    lines = [{k: v for k, v in line.items() if v is not None} for line in log]
    assert told[1] == ["*", "step"] and told[2 : 2 + len(log)] == lines


@pytest.mark.prove
def test_the_log_has_the_epoch_the_time_and_the_memory_and_time_goes_on_when_a_run_does(text, tmp_path):
    _, folder = train_on(1, [*arguments(text, keep=9), "--out", str(tmp_path / "run")])
    past = tmp_path / "run" / "log.jsonl"
    past.write_text(past.read_text().replace('"seconds": ', '"seconds": 1000'))
    log, said = run_ranks(1, listened, ["--resume", f"{folder}/checkpoints/step-000004"])[0]
    assert int(re.search(r"after 8 steps, (\d+) s;", said[-1])[1]) >= 1000, "as long as all its steps took"
    steps = [line for line in log if "loss" in line]
    windows = (Path(text).stat().st_size * 9 // 10) // 16  # of 16 tokens and the last label
    assert [line["epoch"] for line in steps] == pytest.approx([8 * n / windows for n in range(1, 9)], rel=1e-3)
    seconds = [line["seconds"] for line in steps]
    assert seconds[0] > 0 and seconds == sorted(seconds)
    assert all(2**26 < line["memory"] < 2**40 for line in steps)


def heard(words):
    """What a run says, and what it writes to stderr, where a progress bar would be."""
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        return listened(words)[1], stderr.getvalue()


def test_off_a_terminal_there_are_lines_and_no_carriage_returns(text, tmp_path):
    [(said, stderr)] = run_ranks(1, heard, [*arguments(text, steps=4), "--out", str(tmp_path / "run")])
    steps = [line for line in said if re.match(r"step \d of ", line)]
    assert [line.split(":")[0] for line in steps] == ["step 1 of 4", "step 4 of 4"]  # within ten seconds
    assert all(re.fullmatch(r"step \d of 4: loss [\d.]+, norm [\d.]+, lr [\d.e-]+, [\d,]+ tokens/s", s) for s in steps)
    assert "\r" not in stderr


# -------------------------------------------------------------------------------------------------------- generate.py


@pytest.mark.prove
@pytest.mark.parametrize("layout", ["--tp 2 --tied", "--experts 4 --ep 2 --zero 3"])
def test_a_checkpoint_of_any_layout_is_sampled_as_at_the_end_of_its_run(layout, text, tmp_path):
    words = [*arguments(text, steps=4, sample=20), *layout.split(), "--out", str(tmp_path / "run")]
    _, folder = train_on(2, words, tied="--tied" in layout)
    model, config, name, _ = generate.load_model(folder, "cpu")
    assert name == "step-000004"
    tokens = load_corpus(config).val[None, :16].long()
    generator = torch.Generator().manual_seed(config.seed)
    again = generate.generate(model, tokens, 20, 0.8, generator, window=config.seq_len)[0].tolist()
    assert (tmp_path / "run" / "sample.txt").read_text() == bytes(again).decode(errors="replace")


def test_a_run_on_token_ids_is_prompted_with_ids_though_its_data_are_gone(text, tmp_path, monkeypatch, capsys):
    data = tmp_path / "ids.bin"
    data.write_bytes(torch.arange(3000).remainder(300).to(torch.int16).numpy().tobytes())
    words = [*arguments(str(data), steps=1, warmup=0, vocab_size=300), "--out", str(tmp_path / "run")]
    train_on(1, words, vocab_size=300)
    data.unlink()
    monkeypatch.setattr(sys, "argv", ["generate.py", str(tmp_path / "run"), "--prompt", "5 299", "--tokens", "3"])
    assert generate.main() == 0
    said = capsys.readouterr().out.split()
    assert generate.read_prompt("\udcff", Config(), False, None)[0] == [255], "an argument that is no UTF-8"
    for prompt in ("²", "300", "-1"):
        with pytest.raises(UsageError, match="the run's data are token ids; give some below 300"):
            generate.read_prompt(prompt, Config(vocab_size=300), True, None)
    _, path, progress, _ = checkpoint.find(str(tmp_path / "run"))
    old = dataclasses.replace(progress, numbers=None)  # it was not noted then
    assert generate.read_model("cpu", tmp_path / "run", path, old)[3]
    assert said[:2] == ["5", "299"] and len(said) == 5 and all(word.isdigit() for word in said)
    monkeypatch.setattr(generate, "choose", lambda *_: torch.zeros(1, 1, dtype=torch.int64))
    assert generate.main() == 0 and capsys.readouterr().out == "5 299 0 0 0\n", "0 is a token like the others"
    with pytest.raises(UsageError, match="numbers.txt is not bare token ids, on which .*run was trained"):
        train.prepare(["--resume", str(tmp_path / "run"), "--evaluate", "--data", text], 1)


def test_generate_continues_a_prompt_and_ends_in_one_line_when_it_cannot(text, tmp_path, monkeypatch, capsys):
    _, folder = train_on(1, arguments(text, steps=1, warmup=0, experts=4, capacity=1, out=tmp_path / "run"))
    assert {layer.config.capacity for layer in moe_layers(generate.load_model(folder, "cpu")[0])} == {None}
    _, path, progress, _ = checkpoint.find(folder)
    assert not generate.read_model("cpu", tmp_path, path, dataclasses.replace(progress, numbers=None))[3], "of text"
    sizes = LlamaConfig(**progress.sizes)
    like = full_shapes(sizes, Config(**progress.config).mixture(sizes))
    saved = checkpoint.load(path, like, torch.float64)["weights"]
    model = generate.load_model(folder, "cpu")[0]
    found = gather_experts(model, {name: p.detach() for name, p in model.named_parameters()}, None)
    assert len(found) > 2 * 4 * 3 and all(torch.equal(saved[name], weight) for name, weight in found.items())

    def said(*words):
        monkeypatch.setattr(sys, "argv", ["generate.py", *words])
        try:
            code = generate.main()
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    code, out, err = said(f"{folder}/checkpoints/step-000001", "--prompt", "7 times", "--tokens", "5")
    assert code == 0 and out.startswith("7 times") and len(out) > 12 and err == "--- step-000001 of run\n"
    code, _, err = said(str(tmp_path))
    assert code == 2 and err.startswith("generate.py: run ") and err.count("\n") == 1
    greedy = ("--temperature", "0", "--top-k", "3")
    low = (("--top-k", "-1"), ("--top-p", "0"), ("--temperature", "1e-40"))
    low += (("--temperature", "nan"), ("--temperature", "inf"), ("--seed", str(-(2**63) - 1)), ("--top-p", "1.1"))
    for words in (*low, ("--top-p", "nan"), ("--seed", str(2**63)), greedy):
        code, _, err = said(folder, *words)
        assert code == 2 and err.startswith(f"generate.py: {words[0]} ") and err.count("\n") == 1
    assert said(folder, "--tokens", "0")[::2] == (2, "generate.py: --tokens 0 must be at least 1\n")
    first, again, other = (said(folder, "--tokens", "9", "--seed", seed)[1] for seed in "001")
    assert first == again != other
    likeliest = (("--temperature", "0"), ("--temperature", "1e-6"), ("--top-k", "1"), ("--top-p", "1e-9"))
    assert len({said(folder, "--tokens", "9", *words)[1] for words in likeliest}) == 1
    words = [*arguments(text, steps=1, warmup=0, vocab_size=128), "--tied", "--out", str(tmp_path / "small")]
    _, small = train_on(1, words, vocab_size=128)
    tied = generate.load_model(small, "cpu")[0]
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    for prompt, token in (("é", 195), ("\udc80", 128)):
        line = f"generate.py: --prompt has token id {token}, beyond the model's vocabulary of 128\n"
        assert said(small, "--prompt", prompt)[::2] == (2, line)
    assert said(folder, "--prompt", "")[::2] == (
        2,
        "generate.py: --prompt is empty; give at least one token to continue\n",
    )
    monkeypatch.setattr(generate, "choose", lambda *_: torch.zeros(1, 1, dtype=torch.int64))
    assert said(folder, "--prompt", "7 times")[1] == "7 times\n", "of bytes, 0 ends a text"
    assert said(folder, "--prompt", "7 times", "--no-stop", "--tokens", "2")[1] == "7 times\0\0\n"


@pytest.mark.parametrize("experts", [0, 4])
def test_the_cache_of_keys_and_values_changes_no_token_and_computes_each_once(experts):
    sizes = dataclasses.replace(SIZES, qk_norm=True)
    moe = MoEConfig(sizes.hidden, sizes.intermediate, experts, 2) if experts else None
    model, prompt = alone(sizes, moe).double(), torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(20 if p.dim() > 1 else 1)  # lively
    seen = []
    handle = model.model.embed_tokens.register_forward_hook(lambda module, given, out: seen.append(given[0].shape[1]))
    for temperature in (0, 0.9):
        drawn = (12, temperature, torch.Generator().manual_seed(3))
        seen.clear()
        fast = generate.generate(model, prompt, *drawn)
        assert seen == [9] + [1] * 11
        plain = training_step.generate(model, prompt, 12, temperature, torch.Generator().manual_seed(3))
        assert torch.equal(fast, plain), (fast, plain)
    handle.remove()
    assert len({*fast.flatten().tolist()}) > 5
    greedy = (model, prompt[:1], 12, 0, torch.Generator())
    whole = generate.generate(*greedy)[0].tolist()
    for ends in ({whole[14]}, {whole[14], whole[12]}):
        last = min(i for i in range(9, 21) if whole[i] in ends)
        assert generate.generate(*greedy, stop=ends)[0].tolist() == whole[: last + 1]
    rows = iter([torch.tensor([[1], [2]]), torch.tensor([[2], [2]])])
    with mock.patch.object(generate, "choose", lambda *_: next(rows)):
        ended = generate.generate(model, prompt, 12, 0, torch.Generator(), stop={2})
    assert ended[:, 9:].tolist() == [[1, 2], [2, 2]], "until each row has one"
    with mock.patch.object(generate, "choose", mock.Mock(return_value=torch.ones(2, 1, dtype=torch.int64))) as choose:
        generate.generate(model.bfloat16(), prompt, 1, 0.9, torch.Generator())
    assert choose.call_args.args[0].dtype == torch.float32, "tokens are not drawn from 8 bits of a probability"
    assert not choose.call_args.args[0].requires_grad, "nor with a graph"
    with mock.patch.object(generate, "choose", side_effect=MemoryError), pytest.raises(MemoryError):
        generate.generate(model, prompt, 1, 0, torch.Generator())
    assert not any(isinstance(block.self_attn.parts.attention, generate.KVCache) for block in model.model.layers)


def test_a_new_token_sees_no_more_tokens_than_the_model_was_trained_on():
    model = alone(dataclasses.replace(SIZES, layers=1), None).double()  # in a second layer, tokens have seen others
    prompt = torch.randint(256, (1, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(20 if p.dim() > 1 else 1)
        tokens = generate.generate(model, prompt, 12, 0, torch.Generator(), window=6)
        for end in range(9, 21):
            assert tokens[0, end] == model(tokens[:, end - 6 : end])[0, -1].argmax(), end
    assert generate.trained_length(Config(seq_len=96)) == 96
    assert generate.trained_length(Config(seq_len=96, init="theirs")) is None


def test_top_k_and_top_p_are_those_of_transformers():
    logits = 3 * torch.randn(500, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    draws = ((1.0, 5, 1.0), (0.7, 0, 0.8), (1.3, 12, 0.6), (1.0, 1, 1.0), (1.0, 0, 1e-9), (1.0, 41, 1.0))
    for temperature, top_k, top_p in draws:
        scores = TemperatureLogitsWarper(temperature)(None, logits) if temperature != 1 else logits
        scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
        scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
        want = torch.multinomial(scores.softmax(-1), 1, generator=torch.Generator().manual_seed(1))
        got = generate.choose(logits, temperature, torch.Generator().manual_seed(1), top_k, top_p)
        assert torch.equal(got, want), (temperature, top_k, top_p)


def test_where_a_text_ends_stands_in_the_files_of_the_model(tmp_path):
    (tmp_path / "origin").mkdir()
    tokenizer = Tokenizer(eos=7)
    assert generate.ends_of_text(tmp_path, None) == set() and generate.ends_of_text(tmp_path, tokenizer) == {7}
    for name, said, want in (
        ("config.json", 5, {5}),
        ("generation_config.json", [8, 9], {8, 9}),
        ("generation_config.json", None, {5}),
        ("config.json", None, {7}),
    ):
        (tmp_path / "origin" / name).write_text(json.dumps({"eos_token_id": said}))
        assert generate.ends_of_text(tmp_path, tokenizer) == want, (name, said)
    for text in ('{"eos_token_id": "</s>"}', '{"eos_token_id": [1, null]}', "[]", "{"):
        (tmp_path / "origin" / "generation_config.json").write_text(text)
        with pytest.raises(UsageError, match="generation_config.json .*use --no-stop$"):
            generate.ends_of_text(tmp_path, None)
