"""The stand-in GPU of dry runs: what it refuses, and that it finds the mistakes which only a GPU would have shown."""

import os
import re
import subprocess
import sys

import gpu
import pytest
import torch
from harness.layout import files, find
from harness.report import ROOT

FAKE = gpu.surroundings(True)  # with two GPUs


def python(program, *, cwd=ROOT, path="", **environment):
    environment = FAKE | {"PYTHONPATH": f"{path}{os.pathsep}{FAKE['PYTHONPATH']}"} | environment
    return subprocess.run(
        [sys.executable, *program], env=environment, cwd=cwd, capture_output=True, text=True, timeout=500
    )


CASES = """
import numpy, torch, torch.distributed as dist, torch.nn.functional as F
d = torch.device("cuda")

def refused(name, words, call):
    try:
        call()
    except Exception as error:
        assert words in str(error), (name, words, str(error))
        print("refused:", name)
        return
    raise SystemExit(f"{name} went through")

x = torch.randn(4, 5, device=d)
# -- what works, on the device
m = torch.nn.Linear(5, 3).to(d)
o = torch.optim.AdamW(m.parameters(), fused=True)
F.cross_entropy(m(x), torch.zeros(4, dtype=torch.long, device=d)).backward()
o.step()
here = (x, x * 2, x @ x.T, x[0], x.sum(), m.weight, m.weight.grad, x + torch.tensor(1.0))
assert {str(t.device) for t in here} == {"cuda:0"}
assert str(x.cpu().device) == "cpu" and x.cpu().numpy().shape == (4, 5) and x[torch.tensor([0, 1])].is_cuda
w = torch.randn(3, requires_grad=True)
(w.to(d) * 2).sum().backward()
assert not w.grad.is_cuda, "the gradient of a leaf on the host comes back to it"
assert torch.cuda.memory_allocated() > 0 and torch.zeros(2, device="cuda:1").get_device() == 1
# -- two devices
refused("two devices", "same device", lambda: x + torch.ones(5))
refused("two GPUs", "same device", lambda: x + torch.ones(5, device="cuda:1"))
two = torch.zeros(2, 2, dtype=torch.long, device=d)
refused("an index from the device into the host", "same device", lambda: torch.ones(5)[two])
refused("numpy", "numpy", lambda: x.numpy())
refused("asarray", "numpy", lambda: numpy.asarray(x))
# -- who waits for the device, where nobody may; and a second thread, whose device it is as well
torch.cuda.set_sync_debug_mode("error")
refused("a host read", "synchronizing", lambda: x.sum().item())
refused("as many as there are", "synchronizing", lambda: x[x > 0])
refused("a copy that is waited for", "synchronizing", lambda: x.cpu())
refused("numbers of the host", "synchronizing", lambda: torch.tensor([1, 2], device=d))
refused("the same, made beside another", "synchronizing", lambda: x.new_tensor([1.0]))
y = x * 2 + x.sum()  # who waits for nothing may go on
torch.cuda.set_sync_debug_mode("default")
assert x.sum().item() == x.cpu().sum().item()
made = []
import threading
thread = threading.Thread(target=lambda: made.append(x * 2))
thread.start()
thread.join()
assert (made[0] + x).is_cuda, "what a second thread makes is on the device, too"
refused("generator", "generator", lambda: torch.rand(3, generator=torch.Generator(), device=d))
refused("integers", "not implemented", lambda: two @ two)
refused("no such GPU", "ordinal", lambda: torch.zeros(1, device="cuda:7"))
# -- order in time
host = torch.empty(4, 5, pin_memory=True)
host.copy_(x, non_blocking=True)
refused("the host reads too early", "wait for it", lambda: host.sum())
refused("numpy reads too early", "wait for it", lambda: host.numpy())
torch.cuda.synchronize()
host.sum()
there = torch.empty(4, 5, device=d)
there.copy_(host, non_blocking=True)
refused("the host overwrites what is being sent", "wait for it", lambda: host.zero_())
torch.cuda.synchronize()
host.zero_()
s = torch.cuda.Stream()
s.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(s):
    y = x * 2
refused("a stream reads another's", "wait for it", lambda: y + 1)
event = torch.cuda.Event()
event.record(s)
torch.cuda.current_stream().wait_event(event)
y + 1
y.record_stream(torch.cuda.current_stream())  # which read what the other allocated

def in_the_stream(told):
    z, w = x * 3, x * 4
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        there.copy_(z)
        there.copy_(w)
    if told:
        z.record_stream(s), w.record_stream(s)

in_the_stream(True)
x + 1  # z and w are given away when s has read them
in_the_stream(False)
refused("what another stream reads is given away", "record_stream", lambda: x + 1)
refused("and the second of them", "record_stream", lambda: x + 1)
z = x * 3
s.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(s):
    there.copy_(z)
torch.cuda.current_stream().wait_stream(s)
del z  # and nobody need be told
x + 1
a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
a.record(), b.record()
refused("a time that nobody waited for", "not ready", lambda: a.elapsed_time(b))
torch.cuda.synchronize()
assert a.elapsed_time(b) >= 0
# -- the bits of a product
a, b = torch.randn(24, 40, device=d), torch.randn(40, 24, device=d)
exact, rounded = a.double() @ b.double(), []
for torch.backends.cuda.matmul.allow_tf32 in (False, True):
    error = [((p.double() - exact).norm() / exact.norm()).item() for p in (a @ b, F.linear(a, b.t(), b[0, :24] * 0))]
    rounded.append(min(error)), rounded.append(max(error))
torch.backends.cuda.matmul.allow_tf32 = False
assert rounded[1] < 1e-6 and 1e-4 < rounded[2] < 1e-2, rounded
# -- collectives
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(x)
got = [None]
dist.all_gather_object(got, {"a": 1})
assert got == [{"a": 1}] and dist.get_backend() == "nccl"
dist.barrier()
refused("a host tensor in nccl", "No backend type", lambda: dist.all_reduce(torch.ones(2)))
refused("gathering host tensors", "No backend type", lambda: dist.all_gather([torch.ones(2)], torch.ones(2)))
short = torch.ones(2, dtype=torch.int16, device=d)
refused("integers of 16 bits in nccl", "not supported for NCCL", lambda: dist.all_reduce(short))
group = dist.new_group([0])
refused("a host tensor in a group of nccl", "No backend type", lambda: dist.all_reduce(torch.ones(2), group=group))
from torch.distributed.fsdp import fully_shard
plain = torch.nn.Linear(5, 3).to(d)
shards = torch.nn.Linear(5, 3).to(d)
shards.load_state_dict(plain.state_dict())
fully_shard(shards)  # where to, it asks torch
for net in (plain, shards):
    net(x).square().sum().backward()
assert shards.weight.grad.full_tensor().is_cuda and torch.equal(shards.weight.grad.full_tensor(), plain.weight.grad)
dist.destroy_process_group()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(2)), dist.all_reduce(x)
refused("sending from the device over gloo", "host memory only", lambda: dist.group.WORLD.send([x], 0, 0))
dist.destroy_process_group()
print("PASS")
"""


@pytest.mark.prove
def test_what_cuda_and_nccl_refuse_is_refused_and_what_they_do_is_done():
    done = python(["-c", CASES])
    assert done.stdout.strip().splitlines()[-1:] == ["PASS"], done.stdout + done.stderr[-2000:]
    assert done.stdout.count("refused:") == CASES.count('refused("')


COMPILED = """
import torch, triton, triton.language as tl

@triton.jit
def product(a, out, T: tl.constexpr, D: tl.constexpr, WRONG: tl.constexpr):
    t, d = tl.arange(0, T), tl.arange(0, D)
    x = tl.load(a + t[:, None] * D + d[None, :])
    if WRONG:
        x = x + tl.zeros([T], tl.bfloat16)[:, None, None]
    tl.store(out + t[:, None] * T + t[None, :], tl.dot(x, x.T))

def launch(T, D, wrong=False):
    a = torch.zeros(T, D, dtype=torch.bfloat16, device="cuda")
    out = torch.full((T, T), 7.0, device="cuda")
    product[(1,)](a, out, T=T, D=D, WRONG=wrong)
    return out

assert (launch(64, 64) == 7).all(), "it is compiled, and not run"
for name, arguments in (("OutOfResources", (128, 1024)), ("CompilationError", (64, 64, True))):
    try:
        launch(*arguments)
    except Exception as error:
        assert type(error).__name__ == name, error
    else:
        raise SystemExit(f"no {name}")
print("PASS")
"""


@pytest.mark.prove
def test_compiled_kernels_that_need_too_much_shared_memory_or_do_not_compile_are_refused(tmp_path):
    (tmp_path / "compiled.py").write_text(COMPILED)
    done = python(["compiled.py"], cwd=tmp_path, TRITON_INTERPRET="0")
    assert done.stdout.strip() == "PASS", done.stdout + done.stderr[-2000:]


@pytest.mark.prove
@pytest.mark.parametrize(
    "file",
    [file.relative_to(ROOT) for file in (*files("test_*.py", ROOT / "09_kernels"), find("test_fp8_kernels.py"))],
    ids=lambda file: file.stem,
)
def test_compiled_for_a_gpu_every_test_of_kernels_gets_as_far_as_its_numbers(file):
    """No kernel runs, so numbers are wrong. What else fails would fail on a GPU: what does not compile or does not fit,
    a tensor on the host, a message that is another one there."""
    pytest_options = ["-q", "-p", "no:cacheprovider", "--tb=line"]
    done = python(["-m", "pytest", *pytest_options, str(file)], FAKE_GPUS="1", TRITON_INTERPRET="0", RANKS_UNIT="1")
    assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-2000:]
    failures = re.findall(r"^E   .*(?:\n  .*)*", done.stdout, re.MULTILINE)
    numbers = ("E   AssertionError", "E   assert", "E   harness.ranks.RankFailure")
    others = [why for why in failures if not why.startswith(numbers) or "Regex pattern" in why]
    assert not others, "\n".join(others)


@pytest.mark.prove
def test_scales_that_are_compared_to_the_bit_differ_from_those_of_a_gpu(tmp_path):
    """A mistake that this repository had: it passes every test on a CPU, and would fail on any GPU."""
    source = find("fp8_kernels.py")
    text = source.read_text()
    right = 'limit = 0 if device.type == "cpu" else 4'
    assert text.count(right) == 1
    (tmp_path / source.name).write_text(text.replace(right, "limit = 0"))
    done = python([source.name], cwd=tmp_path, path=str(source.parent))
    assert done.returncode == 1 and "apart, in units of the last place" in done.stdout + done.stderr


def test_a_sum_in_order_is_right_beside_a_library_that_cuts_it_into_pieces(monkeypatch):
    """cuBLAS's own error at K = 4096 may be a third of what a sum in order has; TF32 stays far outside."""
    monkeypatch.syspath_prepend(find("matmul_ladder.py").parent)
    import matmul_ladder as ladder

    torch.manual_seed(0)
    a, b = torch.randn(24, 8192), torch.randn(8192, 24)
    out = torch.zeros(24, 24)
    for k in range(8192):
        out += a[:, k : k + 1] * b[k : k + 1]
    want = a.double() @ b.double()
    pieces = sum((a[:, i : i + 64] @ b[i : i + 64] for i in range(0, 8192, 64)), torch.zeros(24, 24))
    assert ladder.rms_error(out, want) > 2 * ladder.rms_error(pieces, want), "this would have been called wrong"
    assert ladder.error_ratio(out, a, b) <= 2
    rounded = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b)]
    assert ladder.error_ratio(rounded[0] @ rounded[1], a, b) > 50
