"""Every formula against what PyTorch does: weights built, bytes saved, FLOPs counted."""

import sys
from dataclasses import replace
from pathlib import Path

import accounting
import pytest
import torch
from accounting import FP32, MIXED, MIXED_FP32_GRADIENTS
from harness.meter import saved_activations
from llama import (
    LLAMA3_8B,
    LLAMA3_70B,
    LLAMA3_405B,
    MODES,
    TINY,
    Llama,
    LlamaConfig,
    Parts,
    attention,
    attention_math,
    next_token_loss,
)
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

torch.set_num_threads(1)  # on tensors this small a second thread only waits
KERNELS = {"fused": attention, "explicit": attention_math}
ODD = LlamaConfig(vocab_size=100, hidden=48, layers=3, heads=6, kv_heads=3, intermediate=40)

# ------------------------------------------------------------------------------------------------ parameters


@pytest.mark.parametrize(
    "config, count",
    [
        (LLAMA3_8B, 8_030_261_248),
        (LLAMA3_70B, 70_553_706_496),
        (LLAMA3_405B, 405_853_388_800),
        (TINY, 19_616),
        (replace(TINY, tied=True), 19_616 - 64 * 32),
        (ODD, None),
        (replace(ODD, hidden=50, qkv_bias=True, own_head_dim=10), None),
        (replace(ODD, lora_rank=5, own_head_dim=10), None),
        (replace(ODD, qk_norm=True, own_head_dim=10), None),
    ],
)
def test_the_parameter_formula_equals_the_model_on_the_meta_device(config, count):
    with torch.device("meta"):
        built = sum(p.numel() for p in Llama(config).parameters())
    assert accounting.parameters(config) == built
    assert count in (built, None)


def test_the_gpt_formula_equals_a_gpt_built_of_torch_modules():
    hidden, layers, vocab = 64, 3, 1000
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(hidden, nhead=4, dim_feedforward=4 * hidden)
        blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        gpt = nn.ModuleList([nn.Embedding(vocab, hidden), blocks, nn.LayerNorm(hidden)])
    assert accounting.gpt_parameters(hidden, layers, vocab) == sum(p.numel() for p in gpt.parameters())


# ---------------------------------------------------------------------------------------------- global batch


@pytest.mark.parametrize(
    "sizes, steps", [((8, 4), 2), ((8, 8), 1), ((512, 1, 128), 4), ((96, 4, 3), 8)], ids=lambda x: str(x)
)
def test_global_batch_is_micro_batch_times_steps_times_ranks(sizes, steps):
    assert accounting.micro_steps(*sizes) == steps


@pytest.mark.parametrize("sizes", [(10, 4), (8, 4, 3), (2, 4), (0, 4), (-8, 4)])
def test_a_global_batch_that_does_not_divide_is_refused_with_one_that_does(sizes):
    with pytest.raises(ValueError, match=f"global batch {sizes[0]} is not a multiple of micro-batch 4") as error:
        accounting.micro_steps(*sizes)
    proposed = int(str(error.value).split()[-1])
    assert accounting.micro_steps(proposed, *sizes[1:]) >= 1
    with pytest.raises(ValueError, match=r"micro-batch 4 x 3 data-parallel rank\(s\) = 12; use for example 24$"):
        accounting.micro_steps(22, 4, 3)  # nearer to 24 than to 12


# ------------------------------------------------------------------- weights, gradients and optimizer states


def test_a_parameter_costs_16_bytes_and_20_with_fp32_gradients():
    assert [r.bytes_per_parameter() for r in (FP32, MIXED, MIXED_FP32_GRADIENTS)] == [16, 16, 20]


@pytest.mark.parametrize("recipe", accounting.RECIPES, ids=lambda r: r.name)
def test_the_bytes_of_a_recipe_are_what_training_with_it_holds(recipe):
    assert accounting.held_by_training(recipe, ODD) == recipe.bytes_per_parameter() * accounting.parameters(ODD)


# ----------------------------------------------------------------------------------------------- activations


def measured(config, batch, seq, dtype, kernel, recompute):
    model = Llama(config, replace(Parts(), attention=KERNELS[kernel]), recompute=recompute).to(dtype)
    tokens = torch.randint(config.vocab_size, (batch, seq), generator=torch.Generator().manual_seed(0))
    with saved_activations(exclude=model.parameters()) as saved:
        next_token_loss(model, tokens)
    return saved.bytes


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
def test_the_activation_formula_equals_the_saved_tensors_to_the_byte(dtype, kernel, recompute):
    multi_query = LlamaConfig(vocab_size=70, hidden=24, layers=1, heads=6, kv_heads=1, intermediate=20)
    for config, batch, seq in (
        (TINY, 1, 8),
        (TINY, 3, 17),
        (ODD, 2, 12),
        (multi_query, 2, 5),
        (replace(ODD, tied=True), 1, 9),
        (replace(ODD, qk_norm=True, own_head_dim=10), 2, 7),
    ):
        predicted = accounting.activations(config, batch, seq, dtype.itemsize, kernel, recompute)
        assert sum(predicted.values()) == measured(config, batch, seq, dtype, kernel, recompute), (config, batch, seq)


def test_the_gpt_activation_formula_is_the_one_of_korthikanti():
    h, L, a, s, b = 12288, 96, 96, 2048, 1
    assert accounting.gpt_activations(h, L, a, s, b) == L * s * b * h * (34 + 5 * a * s / h)
    assert accounting.gpt_activations(h, L, a, s, b, "selective") == 34 * L * s * b * h
    assert accounting.gpt_activations(h, L, a, s, b, "full") == 2 * L * s * b * h


# ----------------------------------------------------------------------------------------------------- FLOPs


def count_flops(config, batch, seq, recompute, backward=True):
    model = Llama(config, replace(Parts(), attention=attention_math), recompute=recompute)
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        loss = next_token_loss(model, tokens)
        if backward:
            loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("config", [TINY, ODD, replace(ODD, tied=True), replace(ODD, own_head_dim=10)])
def test_forward_flops_equal_those_torch_counts_and_a_step_is_three_forwards(config):
    forward = sum(accounting.forward_flops(config, 2, 9).values())
    assert forward == count_flops(config, 2, 9, "none", backward=False)
    assert accounting.step_flops(config, 2, 9).model == 3 * forward == count_flops(config, 2, 9, "none")


@pytest.mark.parametrize("recompute", MODES)
def test_hardware_flops_count_what_recomputation_does_again_and_model_flops_do_not(recompute):
    flops = accounting.step_flops(ODD, 2, 9, recompute, "explicit")
    assert flops.hardware == count_flops(ODD, 2, 9, recompute)
    assert flops.model == 3 * sum(accounting.forward_flops(ODD, 2, 9).values())


# ------------------------------------------------------------------------------------------------ MFU and HFU


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-PCIE-32GB", 112),
        ("Tesla T4", 65),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("nvidia geforce rtx 3090", 71),
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI250X", 191.5),  # one of the two devices of a package
    ],
)
def test_the_peak_is_that_of_the_device_found(name, tflops):
    assert accounting.peak_flops(name) == tflops * 1e12


OTHERS = ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA L40", "NVIDIA A10G", "NVIDIA H20"]


@pytest.mark.parametrize("name", ["CPU", "", "NVIDIA X9000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", *OTHERS])
def test_without_a_known_peak_utilization_is_not_available(name):
    assert accounting.peak_flops(name) is None
    assert accounting.utilization(10**15, 1.0, accounting.peak_flops(name)) == "n/a"


def test_utilization_is_flops_over_seconds_over_the_peak():
    assert accounting.utilization(10**15, 2.0, accounting.peak_flops("NVIDIA H200")) == "50.5%"
    assert accounting.utilization(10**15, 2.0, accounting.peak_flops("NVIDIA L40S")) == "138.1%"


# ------------------------------------------------------------------------------------- tables, demo, command line


def test_the_tables_of_the_readme_are_what_the_command_prints(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["accounting.py", "--tables"])
    assert accounting.main() == 0
    blocks = capsys.readouterr().out.strip().split("\n\n")
    readme = (Path(accounting.__file__).parents[1] / "README.md").read_text()
    for block in blocks:
        assert block in readme, f"README.md lacks or contradicts this; paste it over the old one:\n{block}"
    assert readme.count("<!-- table:") == len(blocks) + 2  # and those of step_peak.py and recompute_policy.py


def test_the_demo_fails_when_a_formula_is_off(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["accounting.py"])
    monkeypatch.setattr(accounting, "parameters", lambda config: 1)
    assert accounting.main() == 1
    captured = capsys.readouterr()
    assert "PASS" not in captured.out and captured.err.startswith("FAIL  parameters: Llama-3 8B: expected 1, measured")
    assert all("parameters:" in said or "bytes held:" in said for said in captured.err.split("; ")), "all else is right"
