"""fused_adamw.py: against torch.optim.AdamW and float64, one tensor at a time and all in one buffer."""

import math
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from _fused_demo import DEVICE, adamw_run, allowed, worst
from fused_adamw import ALIGN, BLOCK, AdamW, adamw_, bytes_held, bytes_moved, flatten
from harness.meter import held_bytes
from harness.programs import assert_refused, printed_json
from torch import nn

SHAPES = [(33, 7), (33,), (1,), (3, BLOCK + 5)]
SETTINGS = dict(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
ONE_STEP = dict(step=1, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
HERE = Path(__file__).parent


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.always("{'eps': 0.001, 'betas': (0.5, 0.999)}")
@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.0}, {"eps": 1e-3, "betas": (0.5, 0.999)}], ids=str)
def test_ten_steps_err_at_most_twice_as_much_as_torchs(settings):
    settings = SETTINGS | settings
    want, _ = adamw_run(partial(torch.optim.AdamW, **settings), SHAPES, torch.float64, 10)
    theirs, _ = adamw_run(partial(torch.optim.AdamW, **settings), SHAPES, torch.float32, 10)
    got, _ = adamw_run(partial(AdamW, **settings), SHAPES, torch.float32, 10)
    error, own = worst(got, want), worst(theirs, want)
    assert error <= allowed(own, torch.float32), f"error {error:.2e}, torch's own is {own:.2e}"


def test_one_flat_buffer_gives_the_bits_of_many_tensors():
    got, optimizer = adamw_run(lambda ps: AdamW([flatten(ps)], **SETTINGS), SHAPES, torch.float32, 4)
    want, _ = adamw_run(partial(AdamW, **SETTINGS), SHAPES, torch.float32, 4)
    assert len(optimizer.state) == 1
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)


def test_moments_of_half_precision_weights_are_float32_and_steps_below_their_precision_need_a_master():
    start = torch.ones(8, dtype=torch.float16, device=DEVICE)
    p = nn.Parameter(start.clone())
    optimizer = AdamW([p], lr=1e-4, weight_decay=0.0)
    for _ in range(5):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert optimizer.state[p]["exp_avg"].dtype == torch.float32
    assert torch.equal(p.detach(), start)  # 1 - 0.0001 rounds to 1: nothing is learned
    master, m, v = start.float(), *torch.zeros(2, 8, device=DEVICE)
    weights = start.clone()
    for step in range(1, 6):
        lr = 1e-4 if step < 5 else 1e-2  # the last step is large: a copy of the weights before it would show
        settings = ONE_STEP | {"step": step, "lr": lr, "weight_decay": 0.0}
        adamw_(master, torch.ones_like(start), m, v, copy=weights, **settings)
    assert torch.equal(weights, master.half()) and (weights < start).all()


def test_a_scale_for_the_gradients_is_as_good_as_multiplying_them():
    scale = torch.tensor(0.25, device=DEVICE)
    results = []
    for g, s in ((random(100, seed=1), scale), (random(100, seed=1) * scale, None)):
        p, m, v = random(100), *torch.zeros(2, 100, device=DEVICE)
        adamw_(p, g, m, v, scale=s, **ONE_STEP)
        results.append((p, m, v))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    p, q = (nn.Parameter(random(9)) for _ in range(2))
    p.grad, q.grad = random(9, seed=2), random(9, seed=2) * scale
    optimizer = AdamW([p])
    optimizer.step(scale=scale)
    AdamW([q]).step()
    assert torch.equal(p.detach(), q.detach())
    optimizer.step(scale=torch.full_like(scale, math.nan))
    assert torch.equal(p.detach(), q.detach()) and optimizer.state[p]["step"] == 2


def test_a_scale_that_is_nan_leaves_weights_moments_and_copy_as_they_are_and_an_infinite_one_does_not():
    scales = {math.nan: True, math.inf: False, 1.0: False}
    for scale, left_out in scales.items():
        p, g = random(BLOCK + 9), random(BLOCK + 9, seed=1)
        m, v, copy = torch.zeros_like(p), torch.zeros_like(p), p.half()
        before = [x.clone() for x in (p, m, v, copy)]
        adamw_(p, g, m, v, scale=torch.tensor(scale, device=DEVICE), copy=copy, **ONE_STEP)
        for old, new in zip(before, (p, m, v, copy), strict=True):
            assert torch.equal(old, new) == left_out, scale


def test_a_parameter_without_a_gradient_stays_as_it_is():
    p, q = (nn.Parameter(random(5)) for _ in range(2))
    before = p.detach().clone()
    q.grad = torch.ones_like(q)
    optimizer = AdamW([p, q], **SETTINGS)
    optimizer.step()
    assert torch.equal(p.detach(), before) and p not in optimizer.state


def test_every_group_has_its_own_settings_and_a_schedule_may_change_them():
    results = []
    for kind in (AdamW, torch.optim.AdamW):
        p, q = nn.Parameter(random(2, 3)), nn.Parameter(random(6, seed=1))
        optimizer = kind([{"params": [p], "weight_decay": 0.5}, {"params": [q], "lr": 0.1}], lr=1e-2)
        for step in range(3):
            optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
            p.grad = random(3, 2, seed=2 + step).T
            q.grad = random(6, seed=9 + step) if step else None  # its first step is the second one
            optimizer.step()
        results.append(torch.cat((p.flatten(), q)).detach())
    assert worst([results[0]], [results[1]]) <= 1e-6


def test_states_go_to_torchs_optimizer_and_back_in_the_middle_of_a_run():
    p, q = nn.Parameter(random(40)), nn.Parameter(random(40))
    first, other = AdamW([p], **SETTINGS), torch.optim.AdamW([q], **SETTINGS)

    def step(optimizer, parameter, seed):
        parameter.grad = random(40, seed=seed)
        optimizer.step()

    for seed in (1, 2):
        step(first, p, seed)
        step(other, q, seed)
    mine, theirs = AdamW([q], **SETTINGS), torch.optim.AdamW([p], **SETTINGS)
    mine.load_state_dict(other.state_dict())
    theirs.load_state_dict(first.state_dict())
    step(mine, q, 3)
    step(theirs, p, 3)
    assert mine.state[q]["step"] == theirs.state[p]["step"] == 3
    assert worst([p.detach()], [q.detach()]) <= 1e-6


def test_a_resumed_run_of_half_precision_weights_is_the_run_itself():
    p, resumed = (nn.Parameter(random(40).half()) for _ in range(2))
    first, second = AdamW([p], **SETTINGS), AdamW([resumed], **SETTINGS)
    p.grad = random(40, seed=1).half() / 3
    first.step()
    resumed.data.copy_(p)
    second.load_state_dict(deepcopy(first.state_dict()))
    for parameter, optimizer in ((p, first), (resumed, second)):
        parameter.grad = random(40, seed=2).half()
        optimizer.step()
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(first.state[p][name], second.state[resumed][name])
    assert torch.equal(p.detach(), resumed.detach())


def test_backward_adds_into_the_flat_buffer_and_the_module_sees_the_new_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2, bias=False)).to(DEVICE)
    want = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    flat = flatten(model.parameters())
    assert torch.equal(torch.cat([p.detach().reshape(-1) for p in model.parameters()]), want)
    assert flat.numel() == 3 * ALIGN and all(p.data_ptr() % 256 == flat.data_ptr() % 256 for p in model.parameters())
    optimizer = AdamW([flat], **SETTINGS)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        before = model(torch.ones(4, 5, device=DEVICE)).sum()
        before.backward()
        for i, p in enumerate(model.parameters()):
            assert torch.equal(flat.grad[i * ALIGN : i * ALIGN + p.numel()], p.grad.reshape(-1)) and p.grad.any()
        optimizer.step()
    assert model(torch.ones(4, 5, device=DEVICE)).sum() < before
    gaps = torch.ones(flat.numel(), dtype=torch.bool)
    for i, p in enumerate(model.parameters()):
        gaps[i * ALIGN : i * ALIGN + p.numel()] = False
    assert (flat.detach().cpu()[gaps] == 0).all()


def test_a_gradient_that_was_cut_off_from_its_buffer_is_an_error_and_not_a_step_with_the_old_one():
    model = nn.Linear(5, 3).to(DEVICE)
    flat = flatten(model.parameters())
    optimizer = AdamW([flat])
    model.zero_grad(set_to_none=True)
    model(torch.ones(1, 5, device=DEVICE)).sum().backward()
    with pytest.raises(RuntimeError, match=r"zero_grad\(set_to_none=False\)"):
        optimizer.step()
    model.zero_grad(set_to_none=True)  # and none follows
    with pytest.raises(RuntimeError, match=r"zero_grad\(set_to_none=False\)"):
        optimizer.step()


def test_a_tied_parameter_lies_in_the_buffer_once_and_gradients_already_there_move_along():
    p = nn.Parameter(random(5))
    p.grad = random(5, seed=1)
    grad = p.grad.clone()
    flat = flatten([p, p])
    assert flat.numel() == ALIGN and torch.equal(flat.grad[:5], grad) and torch.equal(p.grad, grad)
    halves = flatten([nn.Parameter(random(n).half()) for n in (ALIGN, ALIGN + 1)])
    assert halves.numel() == 3 * ALIGN and halves.dtype == halves.grad.dtype == torch.float16


def test_states_take_8_bytes_a_parameter_and_a_step_moves_28():
    p = nn.Parameter(random(1000))
    p.grad = random(1000, seed=1)
    optimizer = AdamW([p])
    optimizer.step()
    assert held_bytes([p], optimizer).optimizer == bytes_held(1000)  # the meter leaves out the count of steps
    m, v = (optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq"))
    read, written = (p, p.grad, m, v), (p, m, v)
    assert bytes_moved(1000) == sum(x.nbytes for x in (*read, *written)) == 28 * 1000
    assert bytes_moved(1000, copy=2) == 30 * 1000
    assert bytes_moved(1000, weight=2) == (2 + 2 + 4 + 16) * 1000 and bytes_moved(1000, gradient=2) == 26 * 1000


def test_what_the_kernel_cannot_do_is_refused_in_one_line():
    x = random(6, 4)
    p = nn.Parameter(random(3))
    cases = {
        "must be contiguous": lambda: adamw_(x.T, x, x, x, **ONE_STEP),
        "p's 24 elements": lambda: adamw_(x, x[:2], x, x, **ONE_STEP),
        "m is torch.float16": lambda: adamw_(x, x, x.half(), x, **ONE_STEP),
        "v is torch.float16": lambda: adamw_(x, x, x, x.half(), **ONE_STEP),
        r"copy \[2, 4\]": lambda: adamw_(x, x, x, x, copy=x[:2], **ONE_STEP),
        r"scale \[\] torch.float64": lambda: adamw_(x, x, x, x, scale=torch.ones((), dtype=torch.float64), **ONE_STEP),
        "p is torch.float64": lambda: adamw_(x.double(), x, x, x, **ONE_STEP),
        "scale": lambda: adamw_(x, x, x, x, scale=x, **ONE_STEP),
        "step 0": lambda: adamw_(x, x, x, x, **{**ONE_STEP, "step": 0}),
        "amsgrad=True": lambda: AdamW([p], amsgrad=True),
        "differentiable=True": lambda: AdamW([p], differentiable=True),
        "maximize=True": lambda: AdamW([p]).load_state_dict(torch.optim.AdamW([p], maximize=True).state_dict()),
        "capturable=True": lambda: AdamW([x]).add_param_group({"params": [p], "capturable": True}),
        "through the moments": lambda: AdamW([p]).load_state_dict(torch.optim.Adam([p], weight_decay=0.1).state_dict()),
        "takes no closure": lambda: AdamW([p]).step(lambda: None),
        "frozen": lambda: flatten([nn.Parameter(random(3), requires_grad=False)]),
        "2 kinds": lambda: flatten([p, nn.Parameter(random(3).half())]),
    }
    for words, call in cases.items():
        assert_refused(words, call)
    for kind, options in ((torch.optim.Adam, {}), (torch.optim.AdamW, {"capturable": True})):
        AdamW([p]).load_state_dict(kind([p], **options).state_dict())  # what changes no number is taken


@pytest.mark.prove
def test_the_kernel_compiles_for_ampere_and_hopper_without_spills_or_offsets_of_32_bits():
    rows = printed_json(HERE / "_fused_compile.py", "fused_adamw.py", TRITON_INTERPRET="0")
    assert sorted(row["sm"] for row in rows) == [80, 80, 90, 90]
    for row in rows:
        assert row["stack"] == 0 and row["local"] == 0, row
        assert row["products_of_32_bits"] == 0, row
        assert row["loads_of_16_bytes"] >= 7, row
