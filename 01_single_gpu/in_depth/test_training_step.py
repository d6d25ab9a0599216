"""The training step: accumulation, the profile, the command line."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import training_step
from harness.meter import held_bytes, peak_memory
from harness.programs import refusal, run_script
from harness.reference import adamw_by_hand, assert_same, assert_same_named, assert_same_trace, sgd_trace
from training_step import IGNORE, TINY, Llama, LlamaConfig, accumulate

HERE = Path(__file__).parent
torch.set_num_threads(1)  # on tensors this small a second thread only waits


def uneven_batch(valid=(9, 4, 1), samples=2, seq=6):
    """Micro-batches (tokens, labels) with these numbers of valid labels."""
    generator = torch.Generator().manual_seed(0)
    batch = []
    for count in valid:
        tokens, labels = (torch.randint(TINY.vocab_size, (samples, seq), generator=generator) for _ in range(2))
        labels.view(-1)[count:] = IGNORE
        batch.append((tokens, labels))
    return batch


def whole(batch):
    return [(torch.cat([tokens for tokens, _ in batch]), torch.cat([labels for _, labels in batch]))]


def trace_of(batch):
    model = Llama(TINY).double()
    return sgd_trace(dict(model.named_parameters()), lambda step: accumulate(model, batch).item())


# ---------------------------------------------------------------------------------------------- accumulation


def test_accumulation_equals_one_big_batch_with_uneven_valid_tokens(monkeypatch):
    batch = uneven_batch()
    assert_same_trace(trace_of(batch), trace_of(whole(batch)))
    monkeypatch.setattr(training_step, "accumulate", lambda model, pairs: [accumulate(model, [pair]) for pair in pairs])
    assert training_step.accumulation_error() > 0.1, "the demo would not see a mean of means"


def test_gradients_not_only_the_logged_loss_are_divided():
    """The reference here is autograd on the formula itself, so that no shared mistake can cancel."""
    batch = uneven_batch((12, 12, 12, 12))
    model = Llama(TINY).double()
    loss = accumulate(model, batch)
    got = model.lm_head.weight.grad.clone()
    (tokens, labels) = whole(batch)[0]
    mean = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    (want,) = torch.autograd.grad(mean, [model.lm_head.weight])
    assert_same(loss, mean, what="loss")
    assert_same(got, want, what="gradient of lm_head.weight")


def test_a_micro_batch_without_valid_tokens_changes_nothing():
    batch = uneven_batch((9, 0, 4))
    assert_same_trace(trace_of(batch), trace_of([batch[0], batch[2]]))


def test_a_batch_without_any_valid_token_gives_loss_zero_and_gradients_zero():
    model = Llama(TINY).double()
    loss = accumulate(model, uneven_batch((0, 0)))
    assert loss.item() == 0
    assert all((p.grad == 0).all() for p in model.parameters())


def test_accumulation_adds_to_the_gradients_that_are_there():
    """Called twice it leaves the sum of both: gradients are zeroed by the step, not by the accumulation."""
    model, batch = Llama(TINY).double(), uneven_batch()
    accumulate(model, batch)
    once = model.lm_head.weight.grad.clone()
    accumulate(model, batch)
    assert_same(model.lm_head.weight.grad, 2 * once, what="gradient")


def test_the_activations_of_one_micro_batch_are_alive_at_a_time():
    def peak(micro_batches):
        model = Llama(TINY)
        accumulate(model, uneven_batch((1,)))  # the gradients exist already
        batch = uneven_batch((12,) * micro_batches)
        with peak_memory() as memory:
            loss = accumulate(model, batch)
        assert not loss.requires_grad
        return memory.peak

    assert peak(4) < 1.05 * peak(2)


def test_accumulation_under_bf16_autocast_keeps_fp32_gradients_and_loss():
    model = Llama(TINY)
    loss = accumulate(model, uneven_batch(), torch.autocast("cpu", torch.bfloat16))
    assert loss.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert_same(loss, accumulate(model, uneven_batch()), tol=2e-2, what="loss")


# ------------------------------------------------------------------------------------------------------ data


def test_the_label_of_a_token_is_the_token_that_follows_it():
    data = torch.arange(200, dtype=torch.uint8)
    for tokens, labels in training_step.random_batches(data, 3, 16, 4, torch.Generator().manual_seed(0)):
        assert tokens.shape == labels.shape == (3, 16)
        assert tokens.dtype == labels.dtype == torch.long
        assert torch.equal(labels, tokens + 1)


def test_every_byte_can_be_drawn_and_none_beyond_the_end():
    data = torch.arange(6, dtype=torch.uint8)  # windows of 5 + 1: only one start fits
    ((tokens, labels),) = training_step.random_batches(data, 4, 5, 1, torch.Generator().manual_seed(0))
    assert (tokens == torch.arange(5)).all() and (labels == torch.arange(1, 6)).all()
    for alone in training_step.next_token_pairs(torch.arange(6)[None]):  # one sample, already int64
        assert alone.untyped_storage().nbytes() == alone.nbytes, "each owns its memory"


def test_the_standard_library_is_the_same_bytes_every_time():
    data = training_step.stdlib_bytes(50_000)
    assert len(data) == 50_000 and data.dtype == torch.uint8
    assert torch.equal(data[:1000], training_step.stdlib_bytes(1000))
    assert b"def " in bytes(data.tolist())


def test_the_text_is_in_sorted_order_whatever_order_the_disk_has_and_without_other_peoples_packages(
    tmp_path, monkeypatch
):
    for name in ("b.py", "a.py", "site-packages/x.py", "z/d.py", "z/c.py", "a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    glob = Path.glob
    monkeypatch.setattr(training_step.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(sorted(glob(self, pattern), reverse=True)))
    assert bytes(training_step.stdlib_bytes().tolist()) == b"a.pyb.pyz/c.pyz/d.py"


# -------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize(("limit", "clips"), [(0.02, True), (1000.0, False)])
def test_three_steps_are_a_hand_written_loop_with_torchs_adamw_whether_clipping_is_active_or_not(limit, clips):
    model, batch = Llama(TINY, recompute="full").double(), uneven_batch()
    optimizer = training_step.adamw(model, 1e-2)
    losses = [training_step.train_step(model, optimizer, batch, max_norm=limit).item() for _ in range(3)]
    reference = Llama(TINY).double()
    want, norms = adamw_by_hand(reference, *whole(batch)[0], 1e-2, limit)
    assert all((norm > limit) == clips for norm in norms)
    for step in range(3):
        assert_same(losses[step], want[step], what=f"loss of step {step}")
    assert_same_named(dict(model.named_parameters()), dict(reference.named_parameters()), what="in the end, weight")


def test_the_gradients_of_the_step_before_are_let_go_before_forward():
    model = Llama(TINY)
    optimizer, held = training_step.adamw(model, 1e-3), []
    model.register_forward_pre_hook(lambda *_: held.append(held_bytes(model).gradients))
    for _ in range(2):
        training_step.train_step(model, optimizer, uneven_batch((9, 4)))
    every = sum(p.nbytes for p in model.parameters())
    assert held == [0, every, 0, every]  # nothing before the first micro-batch, all before the second


def test_no_bytes_stay_behind_over_several_steps():
    model, batch, left = Llama(TINY, recompute="full"), uneven_batch(), []
    optimizer = training_step.adamw(model, 1e-3)
    for _ in range(4):
        with peak_memory() as memory:
            training_step.train_step(model, optimizer, batch)
            model.zero_grad()
        left.append(memory.current)
    assert left[1:] == [0, 0, 0], left  # the first leaves the two moments


def test_norm_scales_are_not_decayed_and_every_parameter_is_trained_once():
    model = Llama(LlamaConfig(tied=True))
    model.model.norm.weight.requires_grad_(False)
    decay = {
        id(p): group["weight_decay"] for group in training_step.adamw(model, 1e-3).param_groups for p in group["params"]
    }
    assert len(decay) == len(list(model.parameters())) - 1, "a frozen one is left out"
    assert all((decay[id(p)] > 0) == (p.dim() > 1) for p in model.parameters() if p.requires_grad)


def test_the_learning_rate_warms_up_and_comes_down_to_a_tenth():
    rates = [training_step.learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert training_step.learning_rate(0, 1, 1.0) == 1.0  # a run of one step


def test_generation_keeps_the_prompt_and_is_repeatable():
    model, prompt = Llama(TINY), torch.tensor([[1, 2, 3], [4, 5, 6]])

    def draw(temperature):
        return training_step.generate(model, prompt, 5, temperature, torch.Generator().manual_seed(0))

    for temperature in (0.0, 1.0):
        tokens = draw(temperature)
        assert tokens.shape == (2, 8) and torch.equal(tokens[:, :3], prompt)
        assert torch.equal(tokens, draw(temperature))
    greedy = draw(0.0)
    assert torch.equal(greedy[:, -1], model(greedy[:, :-1])[:, -1].argmax(-1))
    assert torch.equal(greedy, draw(1e-6)), "the colder, the nearer to the most likely token"


# --------------------------------------------------------------------------------------------------- profile


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """Two profiled steps of a model whose weights outweigh its activations: (trace file, timeline, bytes held)."""
    model = Llama(LlamaConfig(hidden=64, layers=2, heads=4, intermediate=128))
    optimizer = training_step.adamw(model, 1e-3)
    batch = training_step.random_batches(training_step.stdlib_bytes(2000), 2, 16, 2, torch.Generator().manual_seed(0))
    trace = training_step.profile_first_steps(
        lambda: training_step.train_step(model, optimizer, batch),
        lambda: model(batch[0][0]),
        tmp_path_factory.mktemp("profile") / "new folder",
    )
    held = held_bytes(model, optimizer)
    return trace, training_step.memory_timeline(trace, held.parameters, device_type=0), held


@pytest.mark.prove
def test_the_profile_is_a_trace_with_named_ranges_that_chrome_opens(profiled):
    events = json.loads(profiled[0].read_text())["traceEvents"]
    names = [e["name"] for e in events if e.get("cat") == "user_annotation" and e["ph"] == "X"]
    assert names.count("forward") == names.count("backward") == 4  # two steps of two micro-batches
    assert names.count("optimizer") == 2


def test_the_profile_shows_that_step_1_ends_with_the_optimizer_states_and_step_2_adds_none(profiled):
    _, timeline, held = profiled
    summary = training_step.phase_summary(timeline)
    added = [summary[step, "optimizer"][1] - summary[step, "backward"][1] for step in (1, 2)]
    counters = 4 * 20  # AdamW's step counter, 4 bytes for each of 20 tensors
    assert held.optimizer <= added[0] <= held.optimizer + 2 * counters
    assert abs(added[1]) <= 2 * counters
    peaks = [max(peak for (s, _), (peak, _) in summary.items() if s == step) for step in (1, 2)]
    assert peaks[1] > peaks[0]


def test_the_profile_counts_the_weights_and_ends_with_what_is_really_held(profiled):
    _, timeline, held = profiled
    assert timeline[0][3] >= held.parameters
    assert training_step.memory_timeline(profiled[0], 0, device_type=1) == [], "nothing was allocated on a GPU"
    end = training_step.phase_summary(timeline)[2, "optimizer"][1]
    assert held.total <= end <= 1.02 * held.total  # beside them: the batch, the loss, the counters


def test_the_figure_is_drawn(profiled, tmp_path):
    assert training_step.draw_timeline(profiled[1], tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_numbers_are_written_and_a_line_says_what_to_install(profiled, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # import matplotlib.figure now fails
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    trace, _, held = profiled
    report = training_step.Report()
    training_step.report_profile(report, trace, held.parameters, torch.device("cpu"))
    assert "pip install matplotlib" in capsys.readouterr().out
    lines = trace.with_name("memory.csv").read_text().splitlines()
    assert lines[0] == "milliseconds,step,phase,bytes" and len(lines) > 100
    assert report.wrong == [] and len(report.rows) == 4, "the head, two steps of the optimizer, the peaks"
    for weights in (2 * held.parameters, held.parameters // 2):  # of another model
        training_step.report_profile(report, trace, weights, torch.device("cpu"))
    assert [line.split(":")[1] for line in report.wrong] == [" bytes the optimizer adds in step 1"] * 2


# ---------------------------------------------------------------------------------------------- command line


def run_main(options, monkeypatch, step):
    """`main` with this training step, without the sample at its end."""
    monkeypatch.setattr(sys, "argv", ["training_step.py", *options.split()])
    monkeypatch.setattr(training_step, "train_step", step)
    monkeypatch.setattr(training_step, "generate", lambda model, prompt, *_: prompt)
    monkeypatch.setattr(training_step, "accumulation_error", lambda: 0.0)
    return training_step.main()


def test_a_step_of_one_micro_batch_has_no_gradients_before_its_backward_pass(monkeypatch):
    import step_peak

    monkeypatch.setattr(step_peak, "peak", lambda *_: ("loss", 10**9))
    monkeypatch.setattr(training_step, "memory_of", lambda device: 10**9 - 1)
    monkeypatch.setattr(
        sys, "argv", ["training_step.py", "--device", "cpu", "--micro-batch", "4", "--global-batch", "4"]
    )
    assert training_step.parse_arguments().accumulation == 1
    assert "a step needs 1.0 GB or more (loss)" in refusal(training_step.main, "--device cpu --global-batch 8")


def test_every_option_reaches_the_step(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(training_step, "profile_first_steps", lambda step, warm_up, _: [step(), step(), warm_up()])
    monkeypatch.setattr(training_step, "report_profile", lambda *_: None)
    asked = []
    monkeypatch.setattr("step_peak.peak", lambda *given: asked.append(given) or ("loss", 8))

    def note(model, optimizer, batches, precision):
        rates = [group["lr"] for group in optimizer.param_groups]
        seen.append((model, rates, len(batches), batches[0][0].shape, precision, batches[0][0]))
        return torch.tensor(1.0)

    sizes = "--hidden 32 --layers 1 --heads 8 --kv-heads 4 --intermediate 20 --tied --device cpu"
    options = f"{sizes} --steps 12 --micro-batch 3 --global-batch 15 --seq 9 --lr 0.25 --recompute full --bf16 --seed 7"
    assert run_main(f"{options} --profile {tmp_path}", monkeypatch, note) == 0
    model = seen[0][0]
    assert model.config == LlamaConfig(256, 32, 1, 8, 4, 20, tied=True) and model.model.recompute == "full"
    assert asked == [(model.config, 3, 9, 5, "bf16 autocast", "full")]
    first = training_step.Llama(model.config)
    training_step.init_weights(first, 7)
    assert_same_named(dict(model.named_parameters()), dict(first.named_parameters()), what="first weight")
    for step, (_, rates, count, shape, precision, _) in enumerate(seen):
        assert rates == [training_step.learning_rate(step, 12, 0.25)] * 2  # of matrices, and of scales
        assert (count, tuple(shape)) == (5, (3, 9))
        assert precision.fast_dtype == torch.bfloat16 and precision.device == "cpu"
    tokens = seen[0][5]
    assert run_main(options.replace("--seed 7", "--seed 8"), monkeypatch, note) == 0
    assert len(seen) == 24 and not torch.equal(seen[12][5], tokens)


def test_the_loss_that_is_judged_is_the_mean_of_the_last_ten_steps_and_nan_fails(monkeypatch, capsys):
    tiny = "--hidden 8 --layers 1 --heads 2 --intermediate 8 --seq 4 --device cpu"
    for course, code, said in (
        ([9.0] * 30 + [1.0] * 9 + [11.0], 0, "9.000 -> 2.000"),
        ([9.0] * 30 + [5.0] * 9 + [0.0], 1, "9.000 -> 4.500"),
        ([9.0] * 39 + [math.nan], 1, "9.000 -> nan"),
        ([math.nan], 1, "nan -> nan"),
    ):
        losses = iter(course)
        status = run_main(f"{tiny} --steps {len(course)}", monkeypatch, lambda *_: torch.tensor(next(losses)))  # noqa: B023
        assert status == code and said in capsys.readouterr().out


def test_mfu_is_the_flops_of_the_whole_global_batch_per_second_of_a_step(monkeypatch, capsys):
    clock = iter(range(1000))  # a step takes one second, from one look at the clock to the next
    monkeypatch.setattr(training_step.time, "perf_counter", lambda: float(next(clock)))
    config = LlamaConfig(hidden=8, layers=1, heads=2, kv_heads=1, intermediate=8)
    flops = training_step.step_flops(config, 12, 16, "full")
    monkeypatch.setattr(training_step, "peak_flops", lambda name: 4.0 * flops.model)
    sizes = "--hidden 8 --layers 1 --heads 2 --kv-heads 1 --intermediate 8 --device cpu --recompute full"
    options = f"{sizes} --steps 3 --micro-batch 3 --global-batch 12 --seq 16"
    assert run_main(options, monkeypatch, lambda *_: torch.tensor(1.0)) == 0
    hfu = f"{25 * flops.hardware / flops.model:.1f}%"
    assert f"25.0%, {hfu}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, words",
    [
        ("--lr 0", "--lr 0.0 must be a positive number"),
        ("--lr inf", "--lr inf must be a positive number"),
        ("--lr nan", "--lr nan must be a positive number"),
        ("--seq 2000000", "--seq 2000000 must be less than the text"),
        ("--seed -1", "--seed -1 must be 0 to"),
        (f"--profile {__file__}", "no folder can be made there"),
        ("--device meta", "--device meta: use cpu or cuda"),
        ("--device cpu:1", "--device cpu:1: use cpu or cuda"),
        ("--hidden 4000000 --device cpu", "--hidden 4000000 --layers 3 --micro-batch 4 --seq 64: a step needs"),
        ("--seq 1999999 --device cpu", "--seq 1999999: a step needs"),
        ("--global-batch 10", "global batch 10 is not a multiple of micro-batch 4"),
        ("--hidden 130", "hidden 130 is not a multiple of heads 4"),
        ("--kv-heads 3", "heads 4 is not a multiple of kv_heads 3"),
        ("--steps 0", "--steps 0 must be at least 1"),
        ("--micro-batch 0", "--micro-batch 0 must be at least 1"),
        ("--steps 1 --profile profiles", "--profile compares step 1 with step 2"),
        ("--device abacus", "abacus"),
        ("--recompute some", "--recompute: invalid choice: 'some'"),
        ("--seq 0", "--seq 0 must be at least 1"),
    ],
)
def test_a_wrong_option_ends_with_status_2_and_one_line_that_names_it(options, words):
    assert words in refusal(training_step.main, options)


def test_under_torchrun_with_two_ranks_it_points_to_chapter_2_from_one_rank(capsys, monkeypatch):
    assert "02_data_parallel" in refusal(training_step.main, world_size=2)
    monkeypatch.setattr(sys, "argv", ["training_step.py"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as stop:
        training_step.main()
    assert stop.value.code == 2 and capsys.readouterr().err == ""


@pytest.mark.prove
def test_it_trains_with_other_options_and_ends_with_pass():
    options = "--steps 45 --hidden 64 --layers 1 --intermediate 96 --seq 48 --device cpu --recompute full --tied"
    done = run_script(HERE / "training_step.py", *options.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "PASS"
    assert "--- sample ---" in done.stdout and "n/a, n/a" in done.stdout
