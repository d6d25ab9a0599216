"""Nets: properties of all chapters' functions, one for each family of bugs. A message names its family first."""

import ast
import importlib
import re
import sys
from contextlib import nullcontext
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.layout import CHAPTERS, TRAINER, files, scripts
from harness.ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path += [str(folder) for chapter in (*CHAPTERS, TRAINER) for folder in (chapter, chapter / "in_depth")]

# ---------------------------------------------------------------------------------------------------- wrong group

ALONE = ("get_rank", "get_world_size", "get_backend", "barrier")  # they take nothing but a group
PEERS = {"broadcast": 1, "reduce": 1, "send": 1, "recv": 1, "isend": 1, "irecv": 1, "P2POp": 2}  # where a peer stands
COLLECTIVES = {
    *(*PEERS, *ALONE, "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single"),
    *("gather", "scatter", "all_gather_object", "broadcast_object_list", "gather_object"),
}
# These start the world or divide it: it is no technique that is given a group.
OVER_THE_WORLD = {
    *("main", "run", "launch", "world", "start", "one_rank", "largest"),
    *("make_groups", "node_groups", "usp_groups", "expert_groups", "make_mesh", "make_trainer", "generate"),
    "who_is_not_finite",
}
NOT_OF_A_GROUP = {  # a function or class in which something beside the technique asks the world
    *("collectives.py place", "zero_hybrid.py measure", "overlapped_pair.py demo", "mixed_precision.py check"),
    *("five_d.py check", "five_d.py Mesh", "_fpdt_gpu.py verify_model", "_fpdt_gpu.py step"),
    *("expert_dispatch.py global_rank", "_moe_demo.py Wire", "_launch.py batch_of_rank"),
}


def named(call: ast.Call) -> str:
    """The collective that is called: `dist.all_reduce`, `all_reduce`, `self.all_reduce`, but not `x.gather`."""
    *owner, name = ast.unparse(call.func).rsplit(".", 1)
    mine = name in COLLECTIVES and (
        owner in ([], ["dist"], ["torch.distributed"]) or (owner == ["self"] and name != "gather")
    )
    return name if mine else ""


def outside_the_group(tree: ast.AST, file: str, function: str = "") -> list[str]:
    """Calls that would work in the world only: without a group, or with a peer's rank in the world."""
    found = []
    for node in ast.iter_child_nodes(tree):
        inside = function or (node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else "")
        if inside in OVER_THE_WORLD or f"{file} {inside}" in NOT_OF_A_GROUP:
            continue
        found += outside_the_group(node, file, inside)
        if isinstance(node, ast.Attribute) and node.attr in ("WORLD", "get_global_rank"):
            found.append(f"{file}:{node.lineno}: {ast.unparse(node)}")
        if not (isinstance(node, ast.Call) and (name := named(node))):
            continue
        words = {word.arg: word.value for word in node.keywords}
        groups = node.args[0 if name in ALONE else 1 :]  # the first argument of others is a tensor
        if "group" not in words and not any(re.search(r"group(s\[[^]]*\])?$", ast.unparse(value)) for value in groups):
            found.append(f"{file}:{node.lineno}: {ast.unparse(node)} is over the world")
        peer = [ast.unparse(value) for value in node.args[PEERS.get(name, 9) :][:1]]
        if {"src", "dst", "peer"} & words.keys() or (peer and peer != ["None"]):
            found.append(f"{file}:{node.lineno}: {ast.unparse(node)} names its peer by the rank in the world")
    return found


TECHNIQUES = [
    file
    for folder in (*CHAPTERS, TRAINER)
    for file in files("*.py", folder)
    if not file.name.startswith(("test_", "bench_", "conftest"))
    and file.name not in ("train.py", "metrics.py")
    and file.parent.name in (folder.name, "in_depth")
]


@pytest.mark.parametrize("chapter", [*CHAPTERS, TRAINER], ids=lambda folder: folder.name)
def test_every_collective_names_its_group_and_its_peer_within_it(chapter):
    mine = [file for file in TECHNIQUES if chapter in file.parents]
    found = [line for file in mine for line in outside_the_group(ast.parse(file.read_text()), file.name)]
    assert not found, "\n".join(["wrong group: a group may be any slice of the world", *found])


def test_every_group_has_a_timeout():
    """A group does not inherit the world's, and would wait for ten minutes or more. A rank alone waits for nobody."""
    makers = ("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration")
    found = []
    for file in TECHNIQUES:
        if not any(f"{maker}(" in (text := file.read_text()) for maker in makers):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in makers:
                call = ast.unparse(node)
                if not re.search(r"timeout=|timedelta\(|TIMEOUT|world_size=1\b|\(\[dist\.get_rank\(\w*\)\]", call):
                    found.append(f"{file.name}:{node.lineno}: {call}")
    assert not found, "\n".join(["wrong group: it has no timeout", *found])


# ------------------------------------------------------------------------------------------------------- lost NaN


def test_no_largest_error_is_found_by_a_maximum_that_loses_nan():
    """`max((0.0, nan))` is 0.0. Of tensors `.max()` is NaN; of numbers, with `key=lambda e: (e != e, e)`."""
    found = []
    for file in files("*.py"):
        if not re.search(r"\bmax\(", text := file.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "max"):
                continue
            keys, of = [word.arg for word in node.keywords], node.args[0]
            each = ast.unparse(of.elt) if isinstance(of, ast.GeneratorExp | ast.ListComp) else ""
            if "key" not in keys and re.search(r"abs\(\)|\b(relative|error|off)\b", each):
                found.append(f"{file.name}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "\n".join(["lost NaN: a NaN that is not the first of them passes", *found])


SLICE = [1, 2, 3, 4]  # the group of the nets below is a slice of the world: its ranks have other numbers there


def group_of(*slices):
    """The one of these groups that this rank is in; None on other ranks, which have made them, too."""
    made = [(ranks, dist.new_group(ranks)) for ranks in slices or [SLICE[:2]]]
    return next((group for ranks, group in made if dist.get_rank() in ranks), None)


# ------------------------------------------------------------------------------------- state between steps, and aliases


def options_of(**choices):
    """A part of all sets of options, in which each three values (of most three options) stand together."""
    every = list(product(*(range(len(values)) for values in choices.values())))
    chosen = [at for at in every if sum(at) % 2 == 0 and (len(at) < 5 or sum(at[::2]) % 2 == 0)]
    return [{key: choices[key][i] for key, i in zip(choices, at, strict=True)} for at in chosen]


WIDE, EITHER = (None, torch.float32), (False, True)
SHARDED = options_of(hooks=EITHER, master=WIDE, reduce_dtype=WIDE, accumulate_dtype=WIDE)
SHARDED = [options | {"fused": options["hooks"] == (options["master"] is None)} for options in SHARDED]
REDUCED = options_of(
    early=EITHER, rebuild=EITHER, main_grads=EITHER, find_unused=EITHER, to_none=EITHER, bucket_bytes=(1, 4000)
)
REDUCED = [options for options in REDUCED if options["to_none"] or not options["find_unused"]]  # else None is zeros


class BrokenBackward(Exception):
    """What one backward of the nets raises, before it has come to the first weights."""


def reducer(model, group, to_none, **options):
    from gradient_reducers import Reducer

    summed = Reducer(model, group, **options)

    def step(losses):
        model.zero_grad(set_to_none=to_none)
        with summed.no_sync():
            losses[0]().backward()
        try:
            losses[1]().backward()
        finally:
            summed.finish()
        written = {name: p.main_grad if summed.main_grads else p.grad for name, p in model.named_parameters()}
        return {name: gradient for name, gradient in written.items() if gradient is not None}, {}

    return step


def sharded(kind, model, group, fused, **options):
    """Of no momentum, so that the first moment is what the optimizer has been given."""
    from test_zero_stages import AdamWInOneGo
    from zero_state import full_state_dict, load_full_state_dict

    units = {"units": model.layers} if "3" in kind.__name__ else {"bucket_bytes": 4000}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.0, 0.9))
    zero = kind(model, optimizer, group, fused=AdamWInOneGo() if fused else None, **units, **options)
    case = f"{kind.__name__} {options | {'fused': fused}}"

    def step(losses):
        zero.zero_grad()
        for last, loss in enumerate(losses):
            with zero.micro_batch(last=bool(last)):
                try:
                    loss().backward()
                except BrokenBackward:
                    zero.finish()
                    raise
                for p in zero.names if not options["hooks"] else ():
                    zero.start(p)
        returned = zero.full_gradients()
        exact = sum(gradient.double().square().sum() for gradient in returned.values()).sqrt()
        norm = zero.clip_grad_norm(1e-3)
        assert abs(norm - exact) <= 1e-12 * exact, f"dtypes in sums: {case}: norm {norm}, not {exact}"
        zero.scale_gradients(0.5)
        zero.step()
        state = full_state_dict(zero)
        for name, held in state["optimizer"].items():
            want = returned[name].double() * min(1, 1e-3 / exact) * 0.5
            close = torch.allclose(held["exp_avg"].double(), want, rtol=2**-6, atol=0)
            assert close, f"state between steps: {case}: the update of {name} is not by the gradient times both factors"
        for factor in (2, 0.5):
            state["weights"] = {name: factor * weight for name, weight in state["weights"].items()}
            for held in state["optimizer"].values():
                held |= {"master": factor * held["master"]} if "master" in held else {}
            load_full_state_dict(zero, state)
            wrong = [name for name, got in zero.full_weights().items() if not got.equal(state["weights"][name])]
            assert not wrong, f"state between steps: {case}: other weights, loaded, are not those of {wrong[:3]}"
        return dict(enumerate(zero.held()["gradients"])), returned

    return step


OWNERS = ("Reducer", "Zero1", "Zero2", "Zero3", "Overlapped1", "Overlapped2", "Offload2", "Offload3")


def owners_of_gradients(kind):
    """What keeps gradients between two steps, with every set of its options: a name, and how to make it."""
    import zero3
    import zero_offload
    import zero_overlap
    import zero_stages

    if kind == "Reducer":
        return [(f"Reducer {options}", partial(reducer, **options)) for options in REDUCED]
    modules = (zero_stages, zero3, zero_overlap, zero_offload)
    (made,) = {getattr(module, kind) for module in modules if hasattr(module, kind)}
    return [(f"{kind} {options}", partial(sharded, made, **options)) for options in SHARDED]


def overlapping(tensors):
    """Two names whose tensors share memory, or nothing."""
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in tensors.items() if t.numel())
    return [(first[2], second[2]) for first, second in pairwise(spans) if second[0] < first[1]]


def three_steps(kind):
    """Steps on batches a, b, a, whose weights stay: the third has to leave what the first has left. One rank uses
    another parameter in b, and before it a backward has raised."""
    from _zero_demo import Decoder, make_batch, token_loss_sum

    class Sometimes(Decoder):
        def __init__(self):
            super().__init__(hidden=8, heads=2, layers=1)
            self.scale, self.uses_scale, self.breaks = torch.nn.Parameter(torch.ones(5)), False, False
            self.layers[0].register_forward_hook(self.broken)

        def broken(self, layer, args, out):
            def fail(gradient):
                raise BrokenBackward

            if self.breaks:
                out.register_hook(fail)

        def forward(self, tokens):
            logits = super().forward(tokens)
            return logits * self.scale.mean() if self.uses_scale else logits

    group, found = group_of(), []
    if group is None:
        return found

    def loss_of(model, pair, breaks=False):
        def loss():
            model.breaks = breaks
            return token_loss_sum(model, *pair) / 32

        return loss

    for name, make in owners_of_gradients(kind):
        torch.manual_seed(0)
        model = Sometimes().bfloat16()
        step, steps = make(model, group), []
        for number in (0, 1, 0):
            model.uses_scale = number == 1 and group.rank() == 0
            batch = make_batch(number, group.size(), length=8)[group.rank()]
            if number == 1:
                with pytest.raises(BrokenBackward):
                    step([loss_of(model, pair, breaks) for pair, breaks in zip(batch, EITHER, strict=True)])
            written, returned = step([loss_of(model, pair) for pair in batch])
            steps.append(({key: t.clone() for key, t in (written | returned).items()}, returned))
            if pairs := overlapping(written):
                found.append(f"aliases: {name}: gradients {pairs[0]} share memory")
        (first, kept), (last, _) = steps[0], steps[2]
        if wrong := [key for key in first | last if not (key in first and key in last and first[key].equal(last[key]))]:
            found.append(f"state between steps: {name}: step 3 has other gradients than step 1: {wrong[:3]}")
        if wrong := [key for key, t in kept.items() if not torch.equal(t, first[key])]:
            found.append(f"aliases: {name}: a later step has changed what was returned: {wrong[:3]}")
    return found


@pytest.mark.always("Reducer", "Zero1")
@pytest.mark.parametrize("kind", OWNERS)
def test_gradients_of_a_step_depend_on_its_batch_alone(kind):
    for found in run_ranks(3, three_steps, kind, timeout=120):
        assert not found, "\n".join(found)


# ------------------------------------------------------------------------------------------------ modes, and dtypes

S, N, D = 32, 4, 16  # tokens, query heads, head dim; B = 1
DOCUMENTS = (0, 8, 32)
ADDING = ("add_", "index_add_", "index_put_", "_index_put_impl_", "allreduce_", "_reduce_scatter_base_")
# By matrix products of bf16, to be read: their scores are rounded as well.
ROUND_THEIR_SCORES = ("attention_math", "naive_attention", "attention_with_dropout of nothing", "tensor_parallel.py")


def causal_only(attention, *, transposed=False):
    def of(q, k, v, *, causal):
        q, k, v = (x.transpose(1, 2) if transposed else x for x in (q, k, v))
        out = attention(q, k, v)
        return out.transpose(1, 2) if transposed else out

    return of


def fpdt_of_the_core_file(group):
    """Of q, k and v that are one activation, which it cuts into chunks."""
    import fpdt

    offloader, comm = fpdt.HostOffloader(torch.device("cpu")), fpdt.AllToAllComm(group)

    def attention(q, k, v, *, causal):
        heads = (q.shape[2], k.shape[2], v.shape[2])
        x = torch.cat((q, k, v), 2)[0].flatten(1)  # [S/P, (N + 2 N_kv) D]
        return fpdt.fpdt_attention(x, lambda x: x.unflatten(1, (-1, D)).split(heads, 1), (), 2, offloader, comm)[None]

    return lambda *qkv, causal: attention(*qkv, causal=causal).unflatten(2, (-1, D))


def attentions(group, inner, outer):
    """Each attention of the chapters: a name, the function, where this rank's tokens lie, documents, and its modes."""
    import _fpdt_demo
    import context_ring
    import context_ulysses
    import fpdt
    import llama
    import packed_documents as packed
    import parallel_block
    import ring_attention
    import single_gpu
    import tensor_parallel
    import ulysses
    from flash_local import FLASH, tiled
    from fpdt_attention import fpdt_attention, fpdt_positions
    from fpdt_store import CpuMachine, Store

    rank, P = group.rank(), group.size()
    everything, one, both = torch.arange(S), (0, S), (False, True)
    for of in (llama.attention, llama.attention_math, parallel_block.attention, context_ring.dense_attention):
        yield of.__name__, of, everything, one, both
    undropped = partial(parallel_block.attention_with_dropout, drop=lambda weights: weights)
    yield "attention_with_dropout of nothing", undropped, everything, one, both
    yield "_fpdt_demo.dense_attention", _fpdt_demo.dense_attention, everything, one, both
    yield "tensor_parallel.py", causal_only(tensor_parallel.attention, transposed=True), everything, one, (True,)
    for of in (single_gpu.naive_attention, single_gpu.fused_attention):
        yield of.__name__, causal_only(of), everything, one, (True,)
    yield "in_documents", packed.in_documents(DOCUMENTS), everything, DOCUMENTS, both
    yield "masked_attention", packed.masked_attention(DOCUMENTS), everything, DOCUMENTS, both
    ring = ring_attention.RingComm(group)
    for layout in ("contiguous", "zigzag"):
        of = causal_only(lambda *qkv, layout=layout: ring_attention.RingAttention.apply(*qkv, layout, ring))
        yield f"ring_attention.py {layout}", of, ring_attention.token_positions(layout, S, rank, P), one, (True,)
    where = ring_attention.token_positions("contiguous", S, rank, P)
    of = causal_only(partial(ring_attention.simple_ring_attention, ring=ring))
    yield "ring_attention.py, simple", of, where, one, (True,)
    comm = ulysses.AllToAllComm(group)
    of = causal_only(partial(ulysses.ulysses_attention, attention=ulysses.causal_attention, comm=comm))
    yield "ulysses.py", of, where, one, (True,)
    for layout, (name, version) in product(context_ring.LAYOUTS, context_ring.VERSIONS.items()):
        yield f"{name} {layout}", version(group, layout), context_ring.layout_positions(layout, S, rank, P), one, both
    where = context_ring.layout_positions("zigzag", S, rank, P)
    for name, local in (("flash", FLASH), ("tiled", tiled(5))):
        yield f"ring of {name} blocks", context_ring.ring_attention(group, local=local), where, one, both
    for layout, version in product(packed.PACKED_LAYOUTS, packed.TRANSPORTS):
        of = packed.packed_attention(group, DOCUMENTS, layout, version)
        yield f"packed {version} {layout}", of, packed.packed_positions(layout, DOCUMENTS, rank, P), DOCUMENTS, both
    where = context_ring.layout_positions("contiguous", S, rank, P)
    for together in both:
        yield f"ulysses {together=}", context_ulysses.ulysses(group, together=together), where, one, both
    for layout in context_ring.LAYOUTS:
        where = context_ulysses.usp_positions(layout, S, outer.rank(), outer.size(), inner.rank(), inner.size())
        yield f"usp {layout}", context_ulysses.usp(inner, outer, layout), where, one, both
    yield "fpdt", fpdt_attention(group, 2, Store(CpuMachine())), fpdt_positions(S, rank, P, 2), one, (True,)
    yield "fpdt.py", fpdt_of_the_core_file(group), fpdt.token_positions(S, 2, rank, P), one, (True,)


def exact_attention(q, k, v, *, mask):
    """softmax(q kᵀ / √D) v pair by pair; q [B, S, N, D], k and v [B, S, N_kv, D]."""
    k, v = (x.repeat_interleave(N // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bind,bjnd->bnij", q, k) / D**0.5
    return torch.einsum("bnij,bjnd->bind", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


def torch_attention(q, k, v, *, mask):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def with_gradients(attention, qkv, dout, **how):
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = attention(*leaves, **how)
    out.backward(dout)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *(x.grad for x in leaves)), strict=True))


@cache
def inputs_and_results(cu, causal, kv_heads, dtype):
    """q, k, v and dout of whole sequences; results and gradients in float64; and those of PyTorch's attention in dtype,
    whose K/V heads are copied first, so that what their copies get is summed here."""
    torch.manual_seed(0)
    q, dout, k, v = (torch.randn(1, S, n, D).to(dtype) for n in (N, N, kv_heads, kv_heads))
    q, dout, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, dout, k, v))  # heads lie before tokens
    i, document = torch.arange(S), torch.bucketize(torch.arange(S), torch.tensor(cu[1:]), right=True)
    mask = (document[:, None] == document) & (i[:, None] >= i if causal else True)
    exact = with_gradients(exact_attention, [x.double() for x in (q, k, v)], dout.double(), mask=mask)
    copies = [q, *(x.repeat_interleave(N // kv_heads, 2) for x in (k, v))]
    torchs = with_gradients(torch_attention, copies, dout, mask=mask)
    torchs |= {name: torchs[name].double().unflatten(2, (kv_heads, -1)).sum(3).to(dtype) for name in ("dk", "dv")}
    return (q, k, v), dout, exact, torchs


class NarrowSums(TorchDispatchMode):
    """Operators that add to a tensor of 16 bits: also those that a CPU computes in fp32, which a GPU does not."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        if func._opname in ADDING and tensors[0].itemsize == 2:
            self.found.add(func._opname)
        return func(*args, **(kwargs or {}))


def rms(x):
    return x.double().square().mean().sqrt().item()


def every_attention(kv_heads, dtype):
    """Results and gradients beside float64 of the same inputs: where they are rounded, at most 1.5 times as far from it
    as one rounding, or as PyTorch's attention."""
    group, inner, outer = group_of(SLICE), group_of(SLICE[:2], SLICE[2:]), group_of(SLICE[::2], SLICE[1::2])
    if group is None:
        return []
    found, f64, bf16 = [], torch.float64, torch.bfloat16
    for name, attention, where, cu, modes in attentions(group, inner, outer):
        heads = N if name == "fpdt.py" else kv_heads  # in which each rank needs a head of its own
        for causal in modes:
            qkv, dout, exact, torchs = inputs_and_results(cu, causal, heads, dtype)
            with (sums := NarrowSums()) if dtype == bf16 else nullcontext():
                got = with_gradients(attention, [x[:, where] for x in qkv], dout[:, where], causal=causal)
            if dtype == bf16 and sums.found:
                found.append(f"dtypes in sums: {name}, {dtype}: {sums.found} add up in 16 bits")
            for what, whole in exact.items():
                want = whole[:, where]
                limit, error = 8 * torch.finfo(dtype).eps * rms(want), rms(got[what] - want)
                if dtype == bf16:
                    limit = 1.5 * max(rms(want.to(bf16) - want), rms(torchs[what][:, where] - want))
                    limit *= 4 / 3 if name in ROUND_THEIR_SCORES else 1
                if not error <= limit:
                    family = "modes" if dtype == f64 else "dtypes in sums"
                    case = f"{name}, {causal=}, {heads} K/V heads, {dtype}"
                    found.append(f"{family}: {case}: {what} is off by {error:.2g}, more than {limit:.2g}")
    return found


@pytest.mark.always("float64", "bfloat16")
@pytest.mark.parametrize(
    ("kv_heads", "dtype"), [(N, "float64"), (1, "float32"), (1, "bfloat16")], ids=["float64", "float32", "bfloat16"]
)
def test_every_attention_in_every_mode_and_dtype_equals_float64(kv_heads, dtype):
    for found in run_ranks(5, every_attention, kv_heads, getattr(torch, dtype), timeout=120):
        assert not found, "\n".join(found)


@pytest.fixture
def bf16_by_default():
    torch.set_default_dtype(torch.bfloat16)  # as some programs do before they build their model
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("name", "along"), [("single_gpu", 1), ("ring_attention", 1), ("ulysses", 1), ("five_d", 0)])
def test_positions_above_256_are_rotated_by_their_own_angle_in_bf16(name, along, bf16_by_default):
    """bf16 has no 257. Beside float64 of the same input, at most 1.5 times as far as one rounding."""
    x, positions = torch.randn(2048, 1, 2, 8, generator=torch.Generator().manual_seed(0)), torch.arange(2048)
    angle = positions.double()[:, None, None, None] / 10000 ** (torch.arange(4).double() / 4)
    x1, x2 = x.double().chunk(2, -1)
    want = torch.cat((x1 * angle.cos() - x2 * angle.sin(), x2 * angle.cos() + x1 * angle.sin()), -1)
    script = importlib.import_module(name)
    tables = script.rotary_tables(2048, 8, x.device) if name == "single_gpu" else [positions]
    got = script.apply_rotary(x.transpose(0, along), *tables).transpose(0, along)
    error, limit = rms(got - want), 1.5 * rms(want.bfloat16() - want)
    assert error <= limit, f"dtypes in sums: {name}.py: off by {error:.2g}, more than {limit:.2g}"


def test_first_weights_and_the_history_of_fp8_are_fp32_by_any_default(bf16_by_default):
    import fp8
    import llama
    import moe_llama
    import parallel_linear

    for script, name, shape in product(
        (llama, moe_llama, parallel_linear), ("w", "bias", "lora_B.weight"), ((3,), (2, 3))
    ):
        assert script.initial_weight(name, shape, 1, 0).dtype == torch.float32, (script, name, shape)
    assert fp8.History(2, torch.device("cpu")).past.dtype == torch.float32, "of amaxes"


def counted(group):
    """What is counted or summed over the ranks, beside the training step: each as a function of nothing."""
    import data_parallel
    import expert_parallel
    import fixed_dispatch
    import gradient_reducers
    import routing
    import tensor_parallel

    torch.manual_seed(group.rank())
    x, probabilities, labels = torch.randn(8, 16), torch.randn(8, 4).softmax(-1), torch.randint(-100, 6, (8,))
    experts, logits, tp = probabilities.topk(2)[1], torch.randn(8, 3), tensor_parallel.TPContext(group, False)
    weights = torch.randn(4, 16), torch.randn(2, 12, 16), torch.randn(2, 12, 16), torch.randn(2, 16, 12)
    counts = partial(routing.expert_counts, experts, 4)
    return {
        "count_valid_tokens": lambda: data_parallel.count_valid_tokens(labels, group),
        "global_valid_tokens": lambda: gradient_reducers.global_valid_tokens(labels, group),
        "vocab_parallel_cross_entropy": lambda: tensor_parallel.vocab_parallel_cross_entropy(logits, labels, 6, tp),
        "load_balancing_loss": lambda: expert_parallel.load_balancing_loss(probabilities, experts, group),
        "moe": lambda: expert_parallel.moe(x, *weights, 2, 1.0, group)[1],
        "moe_fixed": lambda: fixed_dispatch.moe_fixed(x, *weights, 2, 4, group)[1],
        "balance_loss": lambda: routing.balance_loss(probabilities, routing.group_sum(counts(), group), 2),
        "within_capacity": lambda: routing.within_capacity(experts, 4, 1.0, group),
    }


def every_model():
    """Logits in other modes than training's: evaluated, a model drops nothing; float64 under autocast stays float64.
    Norms of gradients in bf16. Counts and losses without gradients."""
    from moe_layer import MoEConfig
    from moe_llama import LlamaConfig, MoELlama, expert_parameters
    from moe_llama import squared_gradient_norm as norm_with_experts
    from parallel_block import Config
    from parallel_linear import TensorParallel, shards
    from parallel_llama import ParallelLlama, squared_gradient_norm

    group, found = group_of(), []
    if group is None:
        return found
    tokens, small = torch.arange(16).view(2, 8), Config(64, 16, 1, 4, 2, 32)
    moe = LlamaConfig(MoEConfig(16, 12, experts=4, top_k=2, balance=0.2, z=0.01), layers=1)
    models = {"MoELlama": [MoELlama(moe, group, group)] * 2}
    for sequence in (False, True):
        tp = TensorParallel(group, sequence)
        models[f"ParallelLlama {sequence=}"] = [ParallelLlama(small, tp, p=p) for p in (0.0, 0.5)]
    for name, (plain, dropping) in models.items():
        want = plain.double()(tokens)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            got = dropping.double().eval()(tokens)
        if not torch.equal(got, want):
            found.append(f"modes: {name}, evaluated under autocast: logits are off by {(got - want).abs().max():.2g}")
        plain.bfloat16()
        for p in plain.parameters():
            p.grad = torch.full_like(p, 0.1)
        if name == "MoELlama":
            norm, copies = norm_with_experts(plain, group), {key: group.size() for key in expert_parameters(plain)}
            elements = sum(p.numel() * copies.get(key, 1) for key, p in plain.named_parameters())
        else:
            norm, held = squared_gradient_norm(plain, group), shards(plain)
            elements = sum(torch.Size(held[key].full_shape(p)).numel() for key, p in plain.named_parameters())
        exact = elements * p.grad.double().flatten()[0] ** 2
        if not abs(norm - exact) <= 1e-12 * exact:
            found.append(f"dtypes in sums: {name}: of gradients in bf16 the squared norm is {norm}, not {exact}")
    for name, count in counted(group).items():
        with torch.no_grad():
            quiet = count()
        if not torch.equal(quiet, count()):
            found.append(f"modes: {name} is {quiet} without gradients, with them {count()}")
    return found


def test_every_model_and_loss_is_the_same_in_evaluation_and_under_autocast():
    for found in run_ranks(3, every_model):
        assert not found, "\n".join(found)


OF_A_MODEL = {"moe_llama": "loss_sum", "gradient_reducers": "token_loss_sum", "_zero_demo": "token_loss_sum"}


@pytest.mark.parametrize("name", ["data_parallel", "zero", "mixed_precision", *OF_A_MODEL])
def test_the_losses_of_tokens_in_bf16_are_added_up_in_fp32(name):
    logits = torch.randn(2, 300, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(600).view(2, 300) % 7
    loss_sum = getattr(importlib.import_module(name), OF_A_MODEL.get(name, "loss_sum"))
    loss = loss_sum(lambda tokens: logits, None, labels) if name in OF_A_MODEL else loss_sum(logits, labels)
    want = F.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), reduction="sum")
    assert loss.dtype == torch.float32 and abs(loss - want) <= 1e-6 * want, f"dtypes in sums: {loss}, not {want}"


def every_router():
    """Which layers send a token in bf16 to other experts than float64 of the same inputs does."""
    import expert_parallel
    import five_d
    from moe_layer import MoE, MoEConfig

    generator = torch.Generator().manual_seed(0)
    x, router = torch.randn(2000, 16, generator=generator).bfloat16(), torch.randn(8, 16, generator=generator)
    w1, w3 = (torch.randn(8, 12, 16, generator=generator).bfloat16() for _ in range(2))
    w2 = torch.randn(8, 16, 12, generator=generator).bfloat16()
    gates, experts = (x.double() @ router.double().T).softmax(-1).topk(2)
    want = torch.zeros_like(x, dtype=torch.float64)
    for e, weights in enumerate(zip(w1, w3, w2, strict=True)):
        a, b, c = (w.double().T for w in weights)
        gate = (gates * (experts == e)).sum(-1, keepdim=True) / gates.sum(-1, keepdim=True)
        want += gate * (F.silu(x.double() @ a) * (x.double() @ b) @ c)
    params = {"0.router": router, "0.w1": w1, "0.w3": w3, "0.w2": w2}
    config = SimpleNamespace(num_experts=8, top_k=2)
    layer = MoE(MoEConfig(16, 12, experts=8, top_k=2), dist.group.WORLD, dist.group.WORLD)
    layer.load_state_dict(
        {"gate.weight": router, "experts.w1.weight": w1, "experts.w3.weight": w3, "experts.w2.weight": w2}
    )
    layer.experts.bfloat16()
    results = {
        "five_d": five_d.moe(x, params, 0, config, dist.group.WORLD),
        "expert_parallel": expert_parallel.moe(x, router, w1, w3, w2, 2, None, dist.group.WORLD)[0],
        "moe_layer": layer(x),
    }
    found = []
    for name, y in results.items():
        error = (y.double() - want).norm(dim=1) / want.norm(dim=1)
        others = (~(error <= 0.05)).sum()
        if others:
            found.append(f"dtypes in sums: {name} sends {others} of {len(x)} tokens in bf16 to other experts")
    return found


def test_every_router_sends_tokens_in_bf16_to_the_experts_that_float64_chooses():
    assert not (found := run_ranks(1, every_router)[0]), "\n".join(found)


# ---------------------------------------------------------------------------------------------------------- borders


def test_stages_share_the_layers_out_as_evenly_as_can_be():
    import five_d
    import pipeline_parallel

    for p, n in product(range(1, 12), repeat=2):
        if n < p:
            continue
        five = [five_d.layers_of_stage(SimpleNamespace(n_layers=n), SimpleNamespace(pp=p, stage=i)) for i in range(p)]
        model = torch.nn.Sequential(*(torch.nn.Identity() for _ in range(n + 2)))  # an embedding and a head as well
        stages = [pipeline_parallel.build_stage(model, stage, p) for stage in range(p)]
        assert [layer for stage in stages for layer in stage] == list(model)
        assert [layer for stage in five for layer in stage] == list(range(n))
        sizes = [len(stage) - (i == 0) - (i == p - 1) for i, stage in enumerate(stages)]
        for name, each in (("five_d", list(map(len, five))), ("pipeline_parallel", sizes)):
            assert max(each) - min(each) <= 1, f"corners of formulas: {name}: {n} layers on {p} stages: {each}"


def test_windows_reach_the_end_of_a_text_and_no_further(monkeypatch):
    import _pipeline_model
    import _precision_demo
    import _zero_demo
    import data_parallel
    import five_d
    import gradient_reducers
    import single_gpu
    import training_step

    text = bytes(range(70))  # few more tokens than the longest window has, so that all places come
    data, config = torch.tensor(list(text)), SimpleNamespace(seq_len=8, batch=2)
    monkeypatch.setattr(Path, "read_bytes", lambda path: text)
    monkeypatch.setattr(data_parallel.inspect, "getsource", lambda module: text.decode())
    monkeypatch.setattr(torch, "randint", lambda high, size, **_: torch.full(size, high - 1))  # always the last
    windows = [
        ("single_gpu", *single_gpu.get_batch(1, 2, 8, seed=0)[0]),
        ("training_step", *training_step.random_batches(data, 2, 8, 1, torch.Generator())[0]),
        ("five_d", *five_d.get_batch(data, 0, config, masked=False)),
        *(("_precision_demo", *_precision_demo.batch(data, step, rows=1, length=8)) for step in (0, -1)),
    ]
    for step in range(len(text)):
        windows.append(("data_parallel", *data_parallel.get_batch(step, 4)))
        windows.append(("_pipeline_model", *_pipeline_model.make_batch(step, 3)))
        for name, make in (("gradient_reducers", gradient_reducers.make_batch), ("_zero_demo", _zero_demo.make_batch)):
            pairs = [pair for part in make(step, 3) for pair in part]
            windows.append((name, *(torch.stack(parts) for parts in zip(*pairs, strict=True))))
    monkeypatch.undo()
    ends = {}
    for name, tokens, labels in windows:
        valid = labels >= 0
        assert tokens.numel() and torch.equal(labels[valid], tokens[valid] + 1), f"borders: {name}: labels are shifted"
        ends[name] = max(ends.get(name, 0), int(tokens.max()))
    short = {name: end for name, end in ends.items() if end < len(text) - 8}
    assert not short, f"borders: the last tokens of the text are never seen, of {len(text)}: {short}"


# ------------------------------------------------------------------------------------------------------------- options


def says_no(node):
    """Whether this is an `if` that only refuses."""
    words = node.body[0] if isinstance(node, ast.If) and len(node.body) == 1 else None
    call = words.value if isinstance(words, ast.Expr) else None
    name = call.func if isinstance(call, ast.Call) else None
    return getattr(name, "attr", getattr(name, "id", "")) in ("error", "fail", "exit")


def attributes_of(node):
    """The attributes that are read, except to refuse."""
    found = {node.attr} if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) else set()
    return found.union(*map(attributes_of, () if says_no(node) else ast.iter_child_nodes(node)))


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda folder: folder.name)
def test_every_option_of_a_script_is_read_where_it_is_not_refused(chapter):
    for script in scripts(chapter):
        tree = ast.parse(script.read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        added = [call.args[0] for call in calls if getattr(call.func, "attr", "") == "add_argument" and call.args]
        names = {name.value.lstrip("-").replace("-", "_") for name in added if isinstance(name, ast.Constant)}
        unread = names - attributes_of(tree)
        assert not unread, f"options: {script.name} does not read {unread}"


# ------------------------------------------------------------------------------------------------------------ starting

CORE = ["data_parallel", "zero", "tensor_parallel", "ring_attention", "ulysses", "pipeline_parallel"]
CORE += ["expert_parallel", "fpdt", "mixed_precision", "five_d"]


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}  # the second of the second node


@pytest.mark.parametrize("name", CORE)
def test_a_rank_starts_nccl_on_the_gpu_of_its_local_rank_and_no_more_ranks_start_than_gpus(name, monkeypatch, capsys):
    main, calls = importlib.import_module(name).main, {}
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.update(device=getattr(device, "index", device)))
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: calls.update(k, backend=a[0]) or sys.exit(7))

    def start(gpus, **environment):
        calls.clear()
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        for key in TORCHRUN:
            monkeypatch.delenv(key, raising=False)
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        with pytest.raises(SystemExit) as end:
            main()
        started = {key: calls.get(key) for key in ("backend", "device", "rank", "world_size")}
        return end.value.code, *started.values(), calls and calls["timeout"].total_seconds()

    assert start(2, **TORCHRUN | {"RANK": "0", "LOCAL_WORLD_SIZE": "4"}) == (2, None, None, None, None, {})
    assert capsys.readouterr() == ("", f"{name}.py: --nproc_per_node 4: use at most 2, one for each GPU here\n")
    assert start(2, **TORCHRUN | {"LOCAL_WORLD_SIZE": "4"})[0] == 2 and capsys.readouterr() == ("", ""), "rank 3"
    assert start(2, **TORCHRUN) == (7, "nccl", 1, None, None, 60), "with torchrun"
    assert start(0, **TORCHRUN) == (7, "gloo", None, None, None, 60), "without GPUs"
    assert start(1) == (7, "nccl", 0, 0, 1, 60), "alone"
    assert start(0) == (7, "gloo", None, 0, 1, 60), "alone, without GPUs"
