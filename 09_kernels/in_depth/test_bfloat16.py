"""bfloat16, the precision that one trains in, judged without a GPU: every Triton kernel of the chapter errs at most 1.5
times as much as PyTorch does in bfloat16, against float64. (The core file flash_attention.py has a test of its own.)"""

from functools import partial

import elu
import matmul_ladder
import pytest
import torch
from _fused_demo import DEVICE, compare, inputs, loss_inputs
from _interpreted_bf16 import bfloat16
from flash_kernels import REPEATABLE, TRITON, flash_attention
from flash_tiles import explicit_attention, step
from fused import FUSED, REFERENCE
from fused_adamw import adamw_
from fused_loss import FUSED as LOSSES
from fused_loss import REFERENCE as LOSS_REFERENCE
from test_flash_kernels import inputs as of_attention

BF16 = torch.bfloat16
UNCHECKED = ("fused.check", "fused_loss.check", "fused_adamw.check")  # which refuse it in the interpreter
VERSIONS = {"five": TRITON, "seven": REPEATABLE}


def assert_at_most_half_as_much_again(error, own, what):
    assert error <= 1.5 * own, f"{what}: off by {error:.2e} from float64, PyTorch in bfloat16 by {own:.2e}"


@pytest.mark.prove
@pytest.mark.parametrize("name", VERSIONS)
def test_attention_errs_at_most_1_5_times_as_much_as_pytorch(name):
    given = of_attention(70, 70, 4, 2, 32, BF16)
    want = step(partial(explicit_attention, causal=True), *(x.double() for x in given))
    dense = step(partial(explicit_attention, causal=True), *given)
    with bfloat16("flash_kernels.check_inputs"):
        got = step(partial(flash_attention, version=VERSIONS[name]), *given)
    for what, x, y, z in zip(("out", "dq", "dk", "dv"), got, want, dense, strict=True):
        assert x.dtype == BF16
        error, own = (((a.double() - y).norm() / y.norm()).item() for a in (x, z))
        assert_at_most_half_as_much_again(error, own, what)


@pytest.mark.always("rms_norm", "swiglu")
@pytest.mark.parametrize("name", FUSED)
def test_fused_kernels_and_their_gradients(name):
    with bfloat16(*UNCHECKED):
        error, own, *_ = compare(FUSED[name], REFERENCE[name], *inputs(2, 20, 257)[name], BF16)
    assert_at_most_half_as_much_again(error, own, name)


@pytest.mark.always("cross_entropy")
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_their_gradients(name):
    with bfloat16(*UNCHECKED):
        tensors, rest, *_ = loss_inputs(40, 1000, 24)[name]
        error, own, *_ = compare(LOSSES[name], LOSS_REFERENCE[name], tensors, rest, BF16)
    assert_at_most_half_as_much_again(error, own, name)


def test_adamw_with_gradients_and_a_copy_in_bfloat16():
    generator = torch.Generator().manual_seed(0)
    p, g = (torch.randn(1000, generator=generator) for _ in range(2))
    g, settings = g.to(BF16), dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    results = []
    for dtype in (torch.float64, torch.float32):
        weight = torch.nn.Parameter(p.to(DEVICE, dtype, copy=True))
        weight.grad = g.to(DEVICE, dtype)
        torch.optim.AdamW([weight], **settings).step()
        results.append(weight.detach().double())
    ours, m, v = p.to(DEVICE, copy=True), torch.zeros(1000, device=DEVICE), torch.zeros(1000, device=DEVICE)
    copy = torch.empty(1000, dtype=BF16, device=DEVICE)
    with bfloat16(*UNCHECKED):
        adamw_(ours, g.to(DEVICE), m, v, step=1, copy=copy, **settings)
    error, own = ((x - results[0]).norm().item() for x in (ours.double(), results[1]))
    assert_at_most_half_as_much_again(error, own, "weights")
    assert torch.equal(copy, ours.to(BF16)), "the copy is not the weights, rounded to nearest"


def test_elu_errs_at_most_1_5_times_as_much_as_pytorch():
    x = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(DEVICE, BF16)
    dy = torch.randn(3000, generator=torch.Generator().manual_seed(1)).to(DEVICE, BF16)

    def both(function, x):
        x = x.detach().requires_grad_()
        y = function(x)
        return torch.cat((y.detach(), *torch.autograd.grad(y, x, dy.to(x)))).double()

    want, own = both(torch.nn.functional.elu, x.double()), both(torch.nn.functional.elu, x)
    with bfloat16("elu.check_elu"):
        got = both(lambda x: elu.elu(x, 1.0, "triton"), x)
    assert_at_most_half_as_much_again((got - want).norm().item(), (own - want).norm().item(), "y and dx")


def test_the_matrix_product_errs_at_most_1_5_times_as_much_as_pytorchs():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(DEVICE, BF16) for shape in ((70, 100), (100, 50)))
    want = a.double() @ b.double()
    with bfloat16("matmul_ladder.check_matmul"):
        got = matmul_ladder.matmul(a, b, matmul_ladder.TRITON)
    error, own = ((x.double() - want).norm().item() for x in (got, a @ b))
    assert_at_most_half_as_much_again(error, own, "C")
