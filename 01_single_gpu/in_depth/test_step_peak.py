"""The predicted peak against the harness's meter, in nine modes, around the real training step."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import step_peak
import torch
from accounting import parameters
from harness.meter import held_bytes, peak_memory, saved_activations
from llama import MODES, LlamaConfig
from step_peak import PRECISIONS
from training_step import train_step

torch.set_num_threads(1)  # on tensors this small a second thread only waits
DEMO = LlamaConfig(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=172)
WIDE = LlamaConfig(vocab_size=64, hidden=32, layers=1, heads=2, kv_heads=1, intermediate=300)  # peak: the last block
MANY_WORDS = LlamaConfig(vocab_size=1500, hidden=24, layers=3, heads=6, kv_heads=3, intermediate=50)
DEEP = LlamaConfig(vocab_size=300, hidden=48, layers=6, heads=3, kv_heads=3, intermediate=140)
SHAPES = [
    (DEMO, 3, 32, 2),
    (WIDE, 1, 65, 2),
    (replace(WIDE, tied=True), 1, 33, 3),
    (MANY_WORDS, 1, 24, 2),
    (DEEP, 2, 26, 2),
]
SHAPES += [(replace(DEEP, own_head_dim=20), 2, 26, 2), (replace(DEMO, tied=True), 2, 41, 2)]
# Numbers that stand alone, which the meter counts and the formulas do not: the count of valid tokens (8 bytes); the
# running loss, the micro-batch's loss and the sum of its labels' weights; while it is divided, the loss twice.
ALONE = {"end of forward": 24, "loss": 20, "head": 20, "last block": 20}


def context_of(precision):
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16 autocast")


@pytest.mark.always(
    *("fp32-none-config0-3-32-2", "bf16 weights-full-config0-3-32-2"),
    *("bf16 weights-none-config2-1-33-3", "bf16 autocast-selective-config2-1-33-3"),
)
@pytest.mark.parametrize("config, batch, seq, micro_batches", SHAPES)
@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_peak_of_a_real_step_is_the_predicted_one_to_the_byte(
    precision, recompute, config, batch, seq, micro_batches
):
    model, optimizer, data = step_peak.build(config, batch, seq, micro_batches, precision, recompute)
    held = held_bytes(model, optimizer)
    with peak_memory() as memory:  # what is new: gradients are let go at first, so all of them are
        train_step(model, optimizer, data, context_of(precision))
    there = held.parameters + held.optimizer + 2 * 8 * micro_batches * batch * seq
    assert held.total + 2 * 8 * micro_batches * batch * seq == step_peak.held(
        config, batch, seq, micro_batches, precision
    )
    where, predicted = step_peak.peak(config, batch, seq, micro_batches, precision, recompute)
    assert there + memory.peak == predicted + ALONE[where]


@pytest.mark.always("fp32-selective", "bf16 autocast-none", "bf16 weights-full")
@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_bytes_kept_for_backward_are_those_of_the_meter(precision, recompute):
    for config, batch, seq, _ in (SHAPES[0], SHAPES[1], SHAPES[3], SHAPES[5]):  # tied or not is all the same here
        model, _, ((tokens, labels), *_) = step_peak.build(config, batch, seq, 2, precision, recompute)
        with saved_activations(exclude=model.parameters()) as saved, context_of(precision):
            loss = model.parts.cross_entropy(model(tokens), labels)
        assert loss.requires_grad
        kept = sum(step_peak.kept_for_backward(config, batch, seq, precision, recompute).values())
        assert saved.bytes == kept + 2 * 8 * batch * seq + 4  # tokens, labels, the sum of the labels' weights


@pytest.mark.parametrize(
    "precision, recompute", [("fp32", "full"), ("bf16 autocast", "none"), ("bf16 autocast", "full")]
)
def test_the_scripts_own_meter_measures_the_predicted_peak(precision, recompute):
    measured = step_peak.measure(DEMO, 3, 32, 2, precision, recompute)
    assert measured == step_peak.peak(DEMO, 3, 32, 2, precision, recompute)[1]
    if (precision, recompute) == ("bf16 autocast", "none"):  # many tokens: the highest is in SwiGLU, not at a weight
        assert step_peak.measure(WIDE, 1, 128, 2, precision, "none") == step_peak.peak(WIDE, 1, 128, 2, precision)[1]


def test_the_highest_moment_is_another_in_other_shapes():
    found = {step_peak.peak(c, B, S, M, p, m)[0] for c, B, S, M in SHAPES for p in PRECISIONS for m in MODES}
    assert found == {"end of forward", "loss", "last block"}
    assert step_peak.peak(MANY_WORDS, 1, 12)[0] == "head"  # fewer tokens than hidden numbers


def test_wrong_modes_are_named():
    with pytest.raises(ValueError, match="precision 'fp8' must be one of fp32, bf16 autocast"):
        step_peak.peak(DEMO, 1, 64, precision="fp8")
    with pytest.raises(ValueError, match="recompute 'some' must be one of none"):
        step_peak.peak(DEMO, 1, 64, recompute="some")


def test_bf16_weights_hold_half_of_everything():
    T = 3 * 32 * 2
    assert step_peak.held(DEMO, 3, 32, 2, "bf16 weights") == 8 * parameters(DEMO) + 16 * T
    assert step_peak.held(DEMO, 3, 32, 2, "bf16 autocast") == 16 * parameters(DEMO) + 16 * T


def test_the_demo_compares_in_all_nine_modes(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["step_peak.py"])
    monkeypatch.setattr(step_peak, "measure", lambda *given: step_peak.peak(*given)[1] + 1)
    assert step_peak.main() == 1
    captured = capsys.readouterr()
    assert "PASS" not in captured.out and "peak in bytes: fp32, none (loss)" in captured.err
    assert captured.err.count("peak in bytes: ") == 9


def test_the_table_of_the_readme_is_what_the_command_prints(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["step_peak.py", "--tables"])
    assert step_peak.main() == 0
    assert capsys.readouterr().out.strip() in (Path(step_peak.__file__).parents[1] / "README.md").read_text()
