"""fused_loss.py: the loss and the output layer against float64, in chunks, with ignored rows; and a whole model."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import fused_loss
import pytest
import torch
from _fused_demo import DEVICE, allowed, loss_inputs, outputs_and_gradients, worst
from fused import INTERPRETED, rms_norm, rope, swiglu
from fused_loss import (
    FUSED,
    IGNORE,
    bytes_kept,
    chunk_for,
    cross_entropy,
    cross_entropy_reference,
    linear_cross_entropy,
    linear_cross_entropy_reference,
)
from harness.meter import peak_memory, saved_activations
from harness.programs import assert_refused, printed_json
from harness.reference import assert_same_trace, sgd_trace
from harness.report import ROOT
from test_fused import assert_as_good_as_torch, poisoned
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "01_single_gpu" / "in_depth"))
from llama import TINY, Llama, Parts  # noqa: E402

DTYPES = (torch.float64, torch.float32, torch.float16)
__all__ = ["poisoned"]  # a fixture of every test here as well


@pytest.fixture
def small_blocks(monkeypatch):
    """Rows in many blocks: 64 words at a time, in place of 8192."""
    monkeypatch.setattr(fused_loss, "block_of", lambda vocab: (64, 1))


@pytest.mark.always("1")
@pytest.mark.parametrize("vocab", [1, 64, 65, 200])
def test_cross_entropy_errs_at_most_twice_as_much_as_pytorchs(vocab, small_blocks):
    assert_as_good_as_torch(cross_entropy, cross_entropy_reference, *loss_inputs(30, vocab, 8)["cross_entropy"])


def test_cross_entropy_of_a_row_longer_than_its_widest_block():
    assert_as_good_as_torch(cross_entropy, cross_entropy_reference, *loss_inputs(3, 20001, 8)["cross_entropy"])


@pytest.mark.always("7")
@pytest.mark.parametrize("chunk", [1, 7, 16, 40, 1000])
def test_any_chunk_gives_the_loss_and_the_gradients_of_the_whole(chunk, small_blocks, monkeypatch):
    monkeypatch.setattr(fused_loss, "SLICE_BYTES", 50 * 24 * 8)  # of the 130 words: slices of 50, 50 and 30
    tensors, rest = loss_inputs(40, 130, 24)["linear_cross_entropy"]
    assert_as_good_as_torch(
        partial(linear_cross_entropy, chunk=chunk), linear_cross_entropy_reference, tensors, rest, [torch.float64]
    )


@pytest.mark.prove
def test_many_chunks_in_low_precision_add_up_in_float32():
    """150 products, each of one token: a running sum in float16 would be rounded 150 times."""
    tensors, rest = loss_inputs(150, 70, 24)["linear_cross_entropy"]
    call = partial(linear_cross_entropy, chunk=1)
    assert_as_good_as_torch(call, linear_cross_entropy_reference, tensors, rest, [torch.float16])


def test_products_in_16_bits_are_added_in_fp32():
    torch.manual_seed(0)
    a, b, total = torch.randn(9, 5).bfloat16(), torch.randn(9, 4).bfloat16(), torch.ones(5, 4)
    fused_loss.add_product(total, a, b)
    assert (total - 1 - a.float().T @ b.float()).abs().max().item() < 1e-5


@pytest.mark.parametrize("name", list(FUSED))
def test_only_ignored_labels_give_loss_zero_and_gradients_zero_and_no_nan(name):
    tensors, (labels,) = loss_inputs(9, 70, 24)[name]
    for tokens in (9, 0):  # and without a token at all
        given = [(x[:tokens] if len(x) == 9 else x).to(DEVICE) for x in tensors]
        outputs, _ = outputs_and_gradients(FUSED[name], given, [torch.full_like(labels[:tokens], IGNORE).to(DEVICE)])
        for x in outputs:
            assert (x == 0).all()


def test_an_ignored_row_may_hold_anything():
    for value in (float("inf"), -float("inf"), float("nan")):
        x = torch.ones(3, 70, dtype=torch.float32, device=DEVICE)
        x[1] = value
        labels = torch.tensor([3, IGNORE, 5], device=DEVICE)
        loss, gradient = outputs_and_gradients(cross_entropy, [x], [labels])[0]
        assert loss.isfinite() and (gradient[1] == 0).all() and gradient.isfinite().all()


@pytest.mark.prove
def test_large_logits_cost_no_digits(small_blocks):
    tensors, rest = loss_inputs(40, 150, 8)["cross_entropy"]
    assert_as_good_as_torch(cross_entropy, cross_entropy_reference, [tensors[0] + 1000], rest)
    assert_as_good_as_torch(cross_entropy, cross_entropy_reference, [3000 * tensors[0]], rest, DTYPES[:2])


def test_words_that_are_masked_with_minus_infinity_count_as_absent(small_blocks):
    tensors, (labels,) = loss_inputs(6, 300, 8)["cross_entropy"]
    logits = tensors[0].clone()
    logits[:, :130] = -float("inf")  # the first two blocks of 64 have nothing in them
    labels = torch.where(labels >= 0, 130 + labels % 170, labels)
    assert_as_good_as_torch(cross_entropy, cross_entropy_reference, [logits], [labels])


def test_shapes_and_strides_are_those_of_the_caller():
    h, w = torch.randn(2, 2, 7, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(DEVICE)
    w = w.reshape(14, 24)
    labels = torch.randint(14, (2, 7), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    logits = (h @ w.T).transpose(0, 1).contiguous().transpose(0, 1)  # [B, S, V] in memory as [S, B, V]
    wide = torch.cat((h, h), -1)[..., :24]  # rows lie apart
    columns = w.T.contiguous().T  # the weight of a layer that was stored the other way round
    column = torch.stack((labels[0], labels[0].flip(0)), 1)[:, 0]
    cases = {
        "labels with a stride": (cross_entropy, cross_entropy_reference, [logits[0]], [column]),
        "logits [B, S, V]": (cross_entropy, cross_entropy_reference, [logits], [labels]),
        "hidden with gaps": (linear_cross_entropy, linear_cross_entropy_reference, [wide, columns], [labels]),
        "labels with gaps": (cross_entropy, cross_entropy_reference, [logits.mT.mT], [labels.T.contiguous().T]),
    }
    for what, (fused, reference, tensors, rest) in cases.items():
        got, _ = outputs_and_gradients(fused, tensors, rest)
        want, _ = outputs_and_gradients(reference, tensors, rest)
        assert [x.shape for x in got] == [x.shape for x in want], what
        assert worst(got, want) <= 1e-10, what


@pytest.mark.parametrize("name", list(FUSED))
def test_bytes_kept_for_backward_are_as_predicted(name):
    sizes = 10, 130, 24
    for dtype in (torch.float32, torch.float16):
        tensors, rest = loss_inputs(*sizes)[name]
        leaves = [x.to(DEVICE, dtype).requires_grad_() for x in tensors]
        with saved_activations() as saved:
            loss = FUSED[name](*leaves, *(x.to(DEVICE) for x in rest))
        assert saved.bytes == bytes_kept(name, *sizes, dtype), f"{name} in {dtype}"
        assert loss.dtype == torch.float32, f"the loss of {dtype} is a {loss.dtype}"
        del loss


@pytest.mark.prove
def test_no_more_than_a_chunk_of_logits_is_ever_held():
    tokens, vocab, hidden, chunk = 256, 600, 16, 32
    tensors, rest = loss_inputs(tokens, vocab, hidden)["linear_cross_entropy"]
    peaks = {}
    for name, call in (
        ("fused", partial(linear_cross_entropy, chunk=chunk)),
        ("whole", linear_cross_entropy_reference),
    ):
        leaves = [x.to(DEVICE, torch.float32).requires_grad_() for x in tensors]
        rest = [x.to(DEVICE) for x in rest]
        with peak_memory() as memory:
            call(*leaves, *rest).backward()
        peaks[name] = memory.peak
    # A chunk of logits; d weight, as a sum, as a product to be added, and as the result; d hidden, kept and multiplied.
    predicted = 4 * (chunk * vocab + 3 * vocab * hidden + 2 * tokens * hidden)
    small = 20 * tokens + 4096  # labels, losses, m and s, and single numbers
    assert peaks["fused"] <= predicted + small, f"{peaks['fused']} bytes, predicted {predicted}"
    assert peaks["whole"] >= 2 * 4 * tokens * vocab


def test_without_a_need_for_gradients_none_is_computed():
    tensors, (labels,) = loss_inputs(40, 130, 24)["linear_cross_entropy"]
    h, w = (x.to(DEVICE) for x in tensors)
    labels = labels.to(DEVICE)
    want = linear_cross_entropy_reference(h, w, labels)
    with peak_memory() as memory:
        loss = linear_cross_entropy(h, w, labels, chunk=4)
    assert worst([loss], [want]) <= 1e-10
    assert memory.peak < w.nbytes + 8 * (4 * 130 + 5 * 40) + (h.nbytes + w.nbytes if INTERPRETED else 0)
    for which in (0, 1):  # a frozen output layer; a frozen model below it
        leaves = [h.clone(), w.clone()]
        leaves[which].requires_grad_()
        [got] = torch.autograd.grad(linear_cross_entropy(*leaves, labels, chunk=9), leaves[which])
        [exact] = torch.autograd.grad(linear_cross_entropy_reference(*leaves, labels), leaves[which])
        assert worst([got], [exact]) <= 1e-10


def test_under_no_grad_the_logits_are_the_only_product_whatever_the_parameters_want():
    tensors, (labels,) = loss_inputs(40, 130, 24)["linear_cross_entropy"]
    h, w = (x.to(DEVICE).requires_grad_() for x in tensors)
    products, peaks = {}, {}
    for grads in (True, False):
        with torch.set_grad_enabled(grads), FlopCounterMode(display=False) as flops, peak_memory() as memory:
            linear_cross_entropy(h, w, labels.to(DEVICE), chunk=4)
        products[grads], peaks[grads] = flops.get_total_flops() / (2 * 40 * 130 * 24), memory.peak
    assert products == {True: 3, False: 1}
    assert peaks[True] - peaks[False] >= h.nbytes + w.nbytes, f"bytes with gradients and without: {peaks}"


def test_backward_may_run_twice_and_scales_with_the_gradient_of_the_loss():
    tensors, (labels,) = loss_inputs(20, 70, 24)["linear_cross_entropy"]
    leaves = [x.to(DEVICE).requires_grad_() for x in tensors]
    loss = linear_cross_entropy(*leaves, labels.to(DEVICE), chunk=6)
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss / 16, leaves)
    for a, b in zip(once, again, strict=True):
        assert torch.equal(a, 16 * b)


class ScalarsAsOnAGPU(TorchDispatchMode):
    """Before a GPU multiplies, it rounds a tensor without dimensions to the 16 bits of the other factor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mul.Tensor and args[0].dim() > args[1].dim() == 0:
            args = args[0], args[1].to(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_the_gradient_of_the_loss_is_not_rounded_to_16_bits():
    tensors, (labels,) = loss_inputs(20, 70, 24)["linear_cross_entropy"]
    leaves = [(x / 64).to(DEVICE, torch.float16).requires_grad_() for x in tensors]
    loss = linear_cross_entropy(*leaves, labels.to(DEVICE), chunk=6)
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    with ScalarsAsOnAGPU():
        more = torch.autograd.grad(loss, leaves, torch.full_like(loss, 1e5))  # a loss scale, larger than fp16 holds
    assert worst([x / 1e5 for x in more], once) < 2e-3


def under_autocast(tensors, labels, dtype):
    """Loss and gradients, of the layer and of its reference, all in the dtype of the weights."""
    found = []
    for call in (linear_cross_entropy, linear_cross_entropy_reference):
        leaves = [x.to(DEVICE, dtype, copy=True).requires_grad_() for x in tensors]
        with torch.autocast(DEVICE, torch.float16):
            loss = call(*leaves, labels.to(DEVICE))
        found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
        assert [x.dtype for x in found[-1]] == [dtype] * 3
    return found


def test_under_autocast_the_layer_computes_in_the_lower_precision_as_linear_would():
    tensors, (labels,) = loss_inputs(40, 130, 24)["linear_cross_entropy"]
    grads = under_autocast(tensors, labels, torch.float32)
    exact, _ = outputs_and_gradients(linear_cross_entropy_reference, tensors, [labels])
    scale = torch.randn((), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact = [exact[0], *(x / scale for x in exact[1:])]
    error, theirs = worst(grads[0], exact), worst(grads[1], exact)
    assert error <= allowed(theirs, torch.float16) and error > 1e-5, f"{error:.1e}, PyTorch's own is {theirs:.1e}"


def test_autocast_leaves_float64_alone_as_linear_does():
    tensors, (labels,) = loss_inputs(10, 130, 24)["linear_cross_entropy"]
    assert worst(*under_autocast(tensors, labels, torch.float64)) <= 1e-10


def test_a_label_that_is_no_word_is_never_silently_a_number():
    logits, labels = torch.zeros(4, 70), torch.tensor([3, 70, -1, 69])
    if DEVICE == "cpu":
        for no_word in (70, -1):
            wrong = torch.tensor([3, no_word, 69, IGNORE])
            assert_refused("labels must be 0 to 69, or -100", cross_entropy, logits, wrong)
            assert_refused("labels must be 0 to 69, or -100", linear_cross_entropy, logits, torch.zeros(70, 70), wrong)
    logits, labels = logits.to(DEVICE), labels.to(DEVICE)
    loss, m, s = (torch.empty(4, device=DEVICE) for _ in range(3))
    fused_loss.loss_of_rows(logits, labels, loss, m, s)  # as on a GPU, where looking at the labels would make it wait
    out = torch.empty_like(logits)
    fused_loss.gradient_of_rows(logits, labels, m, s, torch.ones((), device=DEVICE), out)
    assert loss.isnan().tolist() == [False, True, True, False]
    assert out.isnan().all(1).tolist() == [False, True, True, False]


def test_what_does_not_fit_is_refused_in_one_line():
    x, w = torch.ones(2, 8, device=DEVICE), torch.ones(70, 8, device=DEVICE)
    labels = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    cases = {
        r"labels are \[3\]": lambda: cross_entropy(x, labels.new_zeros(3)),
        "torch.int32": lambda: cross_entropy(x, labels.int()),
        r"does not fit weight \[70, 4\]": lambda: linear_cross_entropy(x, w[:, :4], labels),
        "torch.float16": lambda: linear_cross_entropy(x, w.half(), labels),
        "chunk 0": lambda: linear_cross_entropy(x, w, labels, chunk=0),
        "on meta": lambda: cross_entropy(x, labels.to("meta")),
        "weight is on meta": lambda: linear_cross_entropy(x, w.to("meta"), labels),
    }
    for words, call in cases.items():
        assert_refused(words, call)


@pytest.mark.parametrize(("size", "most"), [(2**30, 4096), (2**31, 8320)])
def test_a_chunk_holds_no_more_logits_than_it_may_and_all_chunks_are_alike(size, most, monkeypatch):
    monkeypatch.setattr(fused_loss, "CHUNK_BYTES", size)
    assert chunk_for(2**20, 128256, torch.bfloat16) <= most and chunk_for(5, 2**30, torch.float32) == 128
    for tokens in (1, 128, 8192, 32768, 32769, 2**20):
        chunk = chunk_for(tokens, 128256, torch.bfloat16)
        assert chunk % 128 == 0 and chunk <= most
        assert -(-tokens // chunk) == -(-tokens // most), "no more chunks than there have to be"
        assert chunk * -(-tokens // chunk) - tokens < 128 * -(-tokens // chunk), "and none of them much smaller"
    assert chunk_for(0, 100, torch.float32) > 0
    for sizes, most in (((40, 1000, 24, 16), 1000 * 24), ((9, 1000, 3, 16), 9 * 1000), ((99, 5, 24, 16), 99 * 24)):
        assert fused_loss.largest_tensor("linear_cross_entropy", *sizes) == most
        assert fused_loss.largest_tensor("cross_entropy", *sizes) == sizes[0] * sizes[1]


WIDER = """
import fused_loss, torch
a, b = (torch.randn(40, n, generator=torch.Generator().manual_seed(n)).half().cuda() for n in (70, 9))
want = 1 + a.T.float() @ b.float()
fused_loss.SLICE_BYTES = 32 * 9 * 4  # three slices
for fused_loss.ADDS_WIDE in (False, True):
    total = torch.ones(70, 9, device="cuda")
    fused_loss.add_product(total, a, b)
    assert (total - want).abs().max().item() < 1e-5 and total.dtype == torch.float32
"""


@pytest.mark.prove
def test_a_product_in_half_precision_is_added_in_fp32_in_one_step_or_in_two():
    path = os.pathsep.join(str(folder) for folder in (ROOT / "tests/fake_device", HERE, ROOT / "tests"))
    environment = os.environ | {
        "PYTHONPATH": path,
        "FAKE_GPUS": "1",
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run([sys.executable, "-c", WIDER], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.prove
def test_a_llama_of_fused_parts_takes_the_same_three_steps():
    """In steps 0 and 2 by the `cross_entropy` of its parts, in step 1 without ever holding the logits."""
    tokens = torch.randint(TINY.vocab_size, (2, 6), generator=torch.Generator().manual_seed(0))
    labels = torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORE)), 1)
    parts = replace(Parts(), norm=rms_norm, rope=rope, swiglu=swiglu, cross_entropy=cross_entropy)
    traces = []
    for model in (Llama(TINY).double().to(DEVICE), Llama(TINY, parts).double().to(DEVICE)):

        def backward(step, model=model):
            x, y = tokens.to(DEVICE), labels.to(DEVICE)
            if step == 1 and model.parts is parts:
                loss = linear_cross_entropy(model.model(x), model.lm_head.weight, y, chunk=5) / 10
            else:
                loss = model.parts.cross_entropy(model(x), y) / 10
            loss.backward()
            return loss.item()

        traces.append(sgd_trace(dict(model.named_parameters()), backward, steps=3, lr=0.5))
    assert_same_trace(traces[1], traces[0])


@pytest.mark.prove
def test_the_kernels_compile_for_ampere_and_hopper_without_spills_or_offsets_of_32_bits():
    rows = printed_json(HERE / "_fused_compile.py", "fused_loss.py", TRITON_INTERPRET="0")
    assert {(row["kernel"], row["sm"]) for row in rows} >= {
        (f"cross_entropy_{kind}", sm) for kind in ("kernel", "backward_kernel") for sm in (80, 90)
    }
    for row in rows:
        assert row["stack"] == 0 and row["local"] == 0 and row["shared_memory"] <= 166912, row
        assert row["products_of_32_bits"] == 0, row
        if 128256 in row["constants"]:  # a row of 50,257 words begins anywhere, and is read word by word
            assert row["loads_of_16_bytes"] >= 2, row
