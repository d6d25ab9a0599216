"""What the planner prints: commands that train the model that was planned, ties, models of Hugging Face, runs."""

import dataclasses
import json
import shlex
from collections import Counter

import planner_paths  # noqa: F401  finds the trainer and the chapters
import bench_plan
import bench_rehearse
import plan
import plan_after
import plan_search
import pytest
from accounting import peak_flops
from harness.programs import refusal
from llama import LLAMA3_8B, LlamaConfig
from model import PRESETS
from options import Config, UsageError, learning_rate_for
from options import parse as parse_trainer
from plan_memory import Layout
from plan_search import Candidate, Task
from plan_time import CLUSTERS, Step, read_cluster, step_time

LLAMA = {
    "model_type": "llama", "vocab_size": 1000, "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 1408, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip


def task(name="--model llama3-8b", cluster="h100-400g", nodes=4):
    machine = read_cluster(cluster)
    return Task(LLAMA3_8B, None, machine, nodes * machine.gpus_per_node, 512, 4096, name=name)


def written(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(LLAMA | changes))
    return str(file)


# -------------------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize("module", [bench_plan, bench_rehearse])
def test_a_benchmark_says_its_options_and_measures_nothing_for_others(module, monkeypatch, capsys):
    for words, code in ((["--help"], 0), (["--figure"], 2), (["--figures", "--large"], 2)):
        monkeypatch.setattr(module.sys, "argv", ["bench", *words])
        with pytest.raises(SystemExit) as end:
            module.main()
        assert end.value.code == code
    assert "only draws" in capsys.readouterr().out


def test_the_help_names_the_kinds_of_models_that_a_config_json_may_be(capsys):
    with pytest.raises(SystemExit):
        plan.main(["--help"])
    assert "llama, mistral, qwen2, qwen3, mixtral, qwen3_moe" in " ".join(capsys.readouterr().out.split())


def test_both_commands_train_the_planned_model_in_the_planned_layout_on_the_planned_ranks():
    given = task()
    layout = Layout(dp=8, tp=2, pp=2, sequence_parallel=True, zero=1, micro_batch=2, micro_batches=32, seq_len=4096,
                    precision="bf16-master")  # fmt: skip
    _, torchrun, _, _, sbatch = plan.commands(given, layout)
    for line, script in ((torchrun, "11_5d_trainer/train.py"), (sbatch, "11_5d_trainer/train.sbatch")):
        words = shlex.split(line)
        config = Config(**parse_trainer(words[words.index(script) + 1 :]))
        assert PRESETS[config.preset] == LLAMA3_8B
        again = Layout.of(config, LLAMA3_8B, given.gpus)
        assert dataclasses.replace(again, bucket_bytes=layout.bucket_bytes) == layout
        assert (config.data, config.lr, config.steps) == ("TOKENS", learning_rate_for(8_030_261_248, False), 76582)
    assert "--nnodes 4 --nproc_per_node 8" in torchrun and "--nodes=4 --gpus-per-node=8" in sbatch
    assert " --steps 452912 " in plan.commands(dataclasses.replace(given, moe=plan.mixture("mixtral-8x7b")), layout)[1]


PEAKS = {"t4x2": "T4", "l4x8": "L4", "a10x4": "A10", "rtx4090x2": "RTX 4090", "b200": "B200", "v100-dgx2": "V100"}


@pytest.mark.prove
@pytest.mark.parametrize("cluster", PEAKS)
def test_on_every_kind_of_gpu_the_planner_proposes_what_the_trainer_takes_there(cluster):
    machine = read_cluster(cluster)
    assert machine.peak_tflops * 1e12 == peak_flops(PEAKS[cluster])
    model = LlamaConfig(vocab_size=512, hidden=256, layers=4, heads=4, kv_heads=4, intermediate=512)
    given = Task(model, None, machine, machine.gpus_per_node, 32, 256)
    _, found = plan.answer(given)
    words = shlex.split(found["commands"][0])
    asked = parse_trainer(words[words.index("11_5d_trainer/train.py") + 1 :])
    older = cluster in ("t4x2", "v100-dgx2")
    assert asked["precision"] == ("fp16" if older else "bf16-master")
    assert (asked.get("kernels") == "torch") == older
    Config(**asked).check_layout(model, given.gpus)


def test_a_model_without_a_preset_is_started_from_its_folder_or_made_as_its_file_says():
    layout = Layout(dp=32, precision="bf16-master")
    no_preset, file = "--init FOLDER_OF_LLAMA3_405B ", "--config my/model/config.json"  # which has no weights beside it
    asked_for = {file: f"{file} ", "--config my/model": "--init my/model ", "--model llama3-405b": no_preset}
    for asked, says in asked_for.items():
        line = plan.commands(task(asked), layout)[1]
        assert says in line and "--preset" not in line
        assert f" --lr {learning_rate_for(8_030_261_248, '--init' in says):g} " in line


def test_of_layouts_that_are_as_fast_the_one_that_asks_for_least_leads(monkeypatch):
    def candidate(seconds, **axes):
        return Candidate(Layout(**axes), Step({"products": seconds, "update": 0.0}, {}, 1.0), 0, "")

    odd, plain = candidate(1.0, dp=2, ring=4, gather_kv=True, recompute="full"), candidate(1.05, dp=8)
    slow = candidate(1.06, dp=8, zero=3)
    every, ties = plan.by_simplicity([odd, plain, slow])
    assert every == [plain, odd, slow] and ties == 2
    efforts = [plan.effort(each.layout) for each in (plain, odd)]
    assert efforts == [0, 4] and plan.effort(Layout(pp=2, schedule="interleaved", stages_per_rank=2)) == 4
    assert plan.effort(Layout(tp=2, ring=2, ulysses=2, ep=2, fpdt_chunks=2)) == 8, "context in two ways"
    assert plan.family(Layout(ulysses=2, fpdt_chunks=4)) == "data + context parallel with chunks"
    found = plan_search.Found([odd, plain, slow], 7, 5, Counter({"too slow": 2}), None)
    monkeypatch.setattr(plan, "search", lambda _: found)
    monkeypatch.setattr(plan, "alternatives", lambda _, best: [("another", plan_search.name(best.layout))])
    monkeypatch.setattr(plan, "three_steps", lambda _: [])
    lines, data = plan.answer(task())
    names = [plan_search.name(each.layout) for each in (plain, odd, slow)]
    ends = ["data parallel:", names[0], "data + context parallel:", names[1], "the next: +6.0% in all; products +60 ms"]
    for line, end in zip(lines[3:9], [*ends, names[2]], strict=True):
        assert line.endswith(f" {end}"), line
    assert [Layout(**each["layout"]) for each in data["best"]] == [plain.layout, odd.layout, slow.layout]
    assert data["commands"] == plan.commands(task(), plain.layout)[1::3], "of the simplest"
    assert data["alternatives"] == [{"layout": "another", "reason": names[0]}]
    assert (data["layouts"], data["timed"], data["pruned"]) == (7, 5, {"too slow": 2})
    nothing = plan.does_not_fit(task(), plan_search.Found([], 0, 0, Counter(), None))
    assert nothing.startswith("--nodes: no layout divides the model and 512 samples over 32 GPUs")


@pytest.mark.prove
def test_ties_are_grouped_by_the_axes_that_they_use_and_the_simplest_family_leads(monkeypatch):
    def candidate(seconds, **axes):
        layout = Layout(precision="bf16-master", zero=1, seq_len=4096, micro_batches=16, **axes)
        return Candidate(layout, Step({"update": seconds}, {}, 1.0), 1e9, "weights")

    deep, odd = candidate(1.00, dp=16, pp=2), candidate(1.02, dp=16, pp=2, schedule="zb-h1")
    wide, again = candidate(1.02, dp=16, tp=2), candidate(1.01, dp=16, tp=2, recompute="full")
    plain = candidate(1.03, dp=32)
    given = [deep, again, odd, wide, plain]
    every, ties = plan.by_simplicity(given)
    assert every == [plain, deep, odd, wide, again] and ties == 5
    monkeypatch.setattr(plan, "search", lambda task: plan_search.Found(given, 5, 5, Counter(), None))
    lines, _ = plan.answer(task())
    text = "\n".join(lines)
    assert lines[0].startswith("llama3-8b: 32 layers of 4096"), "a plan says for which model it is"
    assert [text.count(f"{' ' * 38}{axes} parallel:") for axes in ("data", "data + pipeline", "data + tensor")] == [
        1,
        1,
        1,
    ]
    first = lines.index(f"{' ' * 38}data parallel:")
    low, high = plan.error_bar()
    assert f"{1.03:9.3f} {1.03 * low:8.3f} {1.03 * high:8.3f}" in lines[first + 1]


@pytest.mark.parametrize(
    ("option", "others"),
    [
        ("--zero-offload", "--zero 2"),
        ("--zero-late-gather", "--zero 2"),
        ("--zero-shards 4", "--zero 2"),
        ("--reduce-dtype fp32", "--zero 1 --precision bf16-master"),
        ("--accumulate-dtype fp32", "--zero 2 --precision bf16-master"),
        ("--tp-overlap domino", "--tp 2 --micro-batch 2"),
        ("--tp-overlap backward", "--tp 2"),
        ("--dispatch once", "--ep 8"),
        ("--capacity 1.5", "--ep 8"),
        ("--documents", "--zero 2"),
        ("--cp-kind ring", "--cp 2"),
        ("--compile", "--zero 2"),
        ("--kernels cuda", "--zero 1 --precision bf16-master"),
        ("--precision fp8-block", "--zero 1"),
        ("--schedule zb-h1", "--ep 4 --recompute full --pp 2"),
    ],
)
def test_an_option_that_has_no_formula_is_refused_by_name(option, others):
    model = "mixtral-8x7b" if "--ep" in others else "llama3-8b"
    given = ["--model", model, "--nodes", "1", "--tokens", "524288"]
    said = refusal(plan.main, [*given, "--explain", f"{others} {option}"])
    assert said.startswith(f"{option} ") and "cannot be planned" in said


@pytest.mark.parametrize("words", ["--ep 4 --pp 2 --recompute full", "--ep 4 --pp 2 --schedule zb-h1"])
def test_experts_in_a_pipeline_are_planned_with_recomputation_or_with_a_split_backward(words):
    given = ["--model", "mixtral-8x7b", "--nodes", "1", "--tokens", "524288"]
    assert plan.main([*given, "--explain", words]) == 0, "only both together have no formula"


def test_kernels_are_those_that_the_trainer_takes_on_the_clusters_gpus(capsys):
    for size, kernels in ((16, "torch"), (32, "triton"), (40, "torch"), (256, "triton"), (272, "torch")):
        model = dataclasses.replace(LLAMA3_8B, own_head_dim=size)
        assert dataclasses.replace(task(), model=model).base.kernels == kernels, size
    given = plan.task_of(
        plan.arguments(["--precision", "fp32", "--kernels", "torch", "--nodes", "2", "--tokens", "65536"])
    )
    assert (given.precision, given.base.kernels, given.gpus, given.global_batch) == ("fp32", "torch", 16, 8)
    assert plan.task_of(plan.arguments([])).gpus == 512 * 8, "without --nodes it is all of the cluster"
    older = ["--cluster", "v100-dgx2", "--nodes", "1", "--seq-len", "512", "--tokens", "8192"]
    for words in (["--kernels", "triton"], ["--explain", "--kernels triton"]):
        said = refusal(plan.main, [*older, *words])
        assert said.startswith("--kernels triton needs GPUs that compute in bf16; use")
    newer = ["--nodes", "1", *older[4:]]
    for given, words, kernels, precision in (
        (older, "--kernels auto", "torch", "fp16"),
        (newer, "--kernels auto", "triton", "bf16-master"),
        (newer, "", "triton", "bf16-master"),  # the layout of no option
        (newer, "--zero 0", "triton", "fp32"),
        (newer, "--precision fp64", "torch", "fp64"),
    ):
        assert plan.main([*given, "--json", "--explain", words]) == 0
        layout = json.loads(capsys.readouterr().out)["layout"]
        assert (layout["kernels"], layout["precision"]) == (kernels, precision), words


@pytest.mark.parametrize(
    ("model", "option"),
    [
        ("llama3-8b", "--experts 8"),
        ("llama3-8b", "--layers 64"),
        ("llama3-8b", "--tied"),
        ("llama3-8b", "--preset small"),
        ("mixtral-8x7b", "--experts 4"),
        ("mixtral-8x7b", "--top-k 1"),
    ],
)
def test_an_option_that_makes_another_model_is_refused_and_not_forgotten(model, option):
    given = ["--model", model, "--nodes", "1", "--tokens", "524288"]
    said = refusal(plan.main, [*given, "--explain", f"--zero 1 {option}"])
    assert said.startswith(f"--explain {option.split()[0]}: --model or --config decides")


def test_the_experts_of_a_model_are_in_its_budget(capsys):
    given = ["--model", "mixtral-8x7b", "--nodes", "1", "--tokens", "524288", "--json", "--explain"]
    assert plan.main([*given, "--ep 8 --zero 1"]) == plan.main([*given, "--ep 8 --zero 1 --experts 8 --top-k 2"]) == 0
    short, long = capsys.readouterr().out.split("}\n{")
    assert short.strip("{}\n") == long.strip("{}\n")
    data, given = json.loads(short + "}"), plan.task_of(plan.arguments(given[:6]))
    again = plan_search.exact(given, Layout(**data["layout"]))
    assert (sum(data["bytes"].values()), data["seconds"]) == (again.peak, pytest.approx(again.step.seconds))


def test_the_three_steps_end_with_the_stage_of_zero_that_is_fastest():
    given = dataclasses.replace(task(nodes=2), global_batch=128)
    steps = plan_search.three_steps(given)
    assert "stage of ZeRO" in steps[-1][0] and steps[-1][1].step.seconds <= steps[0][1].step.seconds
    for zero in (2, 3):
        other = plan_search.exact(given, dataclasses.replace(steps[-1][1].layout, zero=zero))
        assert other.peak > given.memory or other.step.seconds >= steps[-1][1].step.seconds


def test_what_fits_nowhere_is_named():
    said = refusal(plan.main, "--model llama3-70b --cluster h200 --tokens 8192")
    assert said.startswith("--model llama3-70b on 1 GPU(s)")
    said = refusal(plan.main, ["--figure", "bars.svg", "--explain", "--zero 1"])
    assert "argument --explain: not allowed with argument --figure" in said


# ------------------------------------------------------------------------------------------------- models as they come


def test_a_config_of_hugging_face_is_planned_wherever_it_lies(tmp_path):
    file = written(tmp_path)
    other = tmp_path / "any_name.json"
    other.write_text((tmp_path / "config.json").read_text())
    for given in (file, str(tmp_path), str(other)):
        sizes, moe = plan.of_config(given)
        assert (sizes.hidden, sizes.layers, sizes.vocab_size, sizes.tied, moe) == (512, 6, 1000, True, None)
    mixture = written(tmp_path, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
    _, moe = plan.of_config(mixture)
    assert (moe.experts, moe.top_k, moe.intermediate, moe.balance) == (8, 2, 1408, 0.01)


@pytest.mark.parametrize(
    ("change", "says"),
    [({"model_type": "qwen9"}, "'qwen9'"), ({"hidden_size": 511}, "511"), ({"sliding_window": 8}, "sliding_window"),
     ({"num_hidden_layers": -1}, "-1"), ({"is_causal": False}, "is_causal")],
    ids=str,
)  # fmt: skip
def test_a_config_that_is_not_known_is_one_line(change, says, tmp_path):
    said = refusal(plan.main, ["--config", written(tmp_path, **change)])
    assert says in said and f"--config {tmp_path}" in said


@pytest.mark.parametrize(
    "content", ["", "no json", b"\xff\xfe\x00", "[]", json.dumps(LLAMA | {"hidden_size": "wide"})], ids=str
)
def test_a_config_that_is_no_config_is_one_line(content, tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert refusal(plan.main, ["--config", str(file)])


def test_a_wrong_table_of_bandwidths_is_named_and_a_file_that_is_not_json_refused(tmp_path):
    file = tmp_path / "mine.json"
    given = json.loads((CLUSTERS / "a100-dgx.json").read_text())
    for table in ({"two": 5}, {"0": 5}, {"²": 5}, [5], {"2": float("nan")}):
        file.write_text(json.dumps(given | {"all_reduce_gb_per_s": table}))
        with pytest.raises(UsageError, match="all_reduce_gb_per_s"):
            read_cluster(str(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not JSON"):
        read_cluster(str(file))


# ----------------------------------------------------------------------------------------------------- from plan to run


SIZES = LlamaConfig(vocab_size=256, hidden=128, layers=4, heads=4, kv_heads=2, intermediate=320)


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text((CLUSTERS / "cpu.json").read_text())
    return file


def run_folder(folder, speeds, **options):
    """What a run leaves, as far as the planner looks at it."""
    config = Config(steps=300, seq_len=128, micro_batch=2, global_batch=128, **options)
    done = folder / "checkpoints" / "step-000000009"
    done.mkdir(parents=True)
    progress = {
        "step": 9,
        "samples": 0,
        "tokens": 0,
        "config": dataclasses.asdict(config),
        "sizes": dataclasses.asdict(SIZES),
    }
    (done / "manifest.json").write_text(json.dumps({"progress": progress, "files": {}}))
    (folder / "log.jsonl").write_text(
        "".join(json.dumps({"step": i, "tokens_per_s": s}) + '\n{"eval_loss": 5}\n' for i, s in enumerate(speeds))
    )
    return folder


def test_a_run_is_put_beside_its_prediction_and_its_speed_into_the_file(tmp_path, own, capsys):
    layout = Layout(dp=64, micro_batch=2, seq_len=128, kernels="triton")
    cluster = read_cluster(str(own))
    slower = 1.5 * step_time(SIZES, None, layout, cluster).seconds
    tokens = 128 * 128
    run = run_folder(tmp_path / "run", [9e9, 9e9, 9e9, tokens / slower, tokens / slower * 2, tokens / slower / 2])
    words = ["--after", str(run), "--cluster", str(own), "--nodes", "1"]
    assert plan.main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["measured"] == pytest.approx(slower) and said["predicted"] == pytest.approx(slower / 1.5)
    assert read_cluster(str(own)) == cluster, "it wrote without being asked"
    assert plan.main([*words[:4], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == said, "without --nodes it is all of the file"
    mixed = run_folder(tmp_path / "mixed", [tokens / slower / 20] * 4, experts=4)
    assert plan.main(["--after", str(mixed), *words[2:], "--json"]) == 0
    right = dataclasses.replace(cluster, ceiling=json.loads(capsys.readouterr().out)["ceiling"])
    moe = Config(experts=4).mixture(SIZES)
    assert step_time(SIZES, moe, layout, right).seconds == pytest.approx(20 * slower)
    assert plan.main([*words, "--write"]) == 0
    text = capsys.readouterr().out
    assert f"measured   {slower:10.4f} s a" in text and f"they agree at {said['ceiling']:.4f}" in text
    changed = read_cluster(str(own))
    assert changed.ceiling == pytest.approx(said["ceiling"]) and 0 < changed.ceiling < cluster.ceiling
    assert step_time(SIZES, None, layout, changed).seconds == pytest.approx(slower, rel=1e-6)
    assert dataclasses.replace(changed, ceiling=cluster.ceiling) == cluster, "another field changed too"


def test_what_a_run_cannot_tell_is_one_line(tmp_path, own, capsys):
    run = run_folder(tmp_path / "run", [1.0] * 3)
    impossible = run_folder(tmp_path / "fast", [1e15] * 9)
    damaged = run_folder(tmp_path / "damaged", [1.0] * 9)
    (damaged / "log.jsonl").write_text('{"step": 1, "tok')
    packed = run_folder(tmp_path / "packed", [1.0] * 9, documents=True)
    silent = run_folder(tmp_path / "silent", [1.0] * 9)
    (silent / "log.jsonl").unlink()
    here = ["--cluster", str(own), "--nodes", "1"]
    for words, says in (
        (["--after", str(tmp_path / "nowhere"), *here], "is no folder"),
        (["--after", str(tmp_path), *here], "--after"),
        (["--after", str(run), *here], "which warm up"),
        (["--after", str(damaged), *here], "log.jsonl is damaged"),
        (["--after", str(silent), *here], "holds no log.jsonl"),
        (["--after", str(packed), *here], "--documents cannot be planned"),
        (["--after", str(run), "--cluster", "cpu", "--write"], "--write would change cpu"),
        (["--after", str(run), "--cluster", str(own), "--nodes", "2"], "--nodes 2 is more than the 1"),
        (["--after", str(impossible), *here, "--write"], "no share of the peak explains it"),
    ):
        assert says in refusal(plan.main, words), words
    assert "--write needs --after" in refusal(plan.main, ["--write"])
    capsys.readouterr()
    assert plan.main(["--after", str(impossible), *here, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ceiling"] is None


def test_the_ceiling_that_is_found_gives_the_measured_seconds():
    cluster, layout = read_cluster("h100x8"), Layout(dp=8, micro_batches=4, seq_len=4096, precision="bf16-master")
    for ceiling in (0.3, 0.55, 1.0):
        seconds = step_time(LLAMA3_8B, None, layout, dataclasses.replace(cluster, ceiling=ceiling)).seconds
        assert plan_after.fitting_ceiling(LLAMA3_8B, None, layout, cluster, seconds) == pytest.approx(ceiling, rel=1e-6)
    for seconds in (1e-9, 1e9):
        assert plan_after.fitting_ceiling(LLAMA3_8B, None, layout, cluster, seconds) is None
