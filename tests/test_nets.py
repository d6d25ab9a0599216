"""Nets: properties of all chapters' functions, one for each family of bugs. A message names its family first."""

import ast
import re
import sys
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from harness.layout import CHAPTERS, TRAINER, files
from harness.ranks import run_ranks

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
    *("main", "run", "launch", "world", "start", "_start", "_worker", "one_rank", "largest", "processor_seconds"),
    *("make_groups", "node_groups", "usp_groups", "expert_groups", "make_mesh", "make_trainer", "generate"),
    "who_is_not_finite",
}
NOT_OF_A_GROUP = {  # a function or class in which something beside the technique asks the world
    *("collectives.py place", "zero_hybrid.py measure", "overlapped_pair.py demo", "mixed_precision.py check"),
    *("five_d.py check", "five_d.py Mesh", "_fpdt_gpu.py verify_model", "_fpdt_gpu.py step"),
    *("expert_dispatch.py global_rank", "_moe_demo.py Wire"),
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


SLICE = [1, 2]  # the group of the nets below is a slice of the world: its ranks have other numbers there


def group_of_the_slice():
    """None on other ranks, which have made it, too."""
    group = dist.new_group(SLICE)
    return group if dist.get_rank() in SLICE else None


# ------------------------------------------------------------------------------------- state between steps, and aliases


def options_of(**choices):
    """A part of all sets of options, in which each three values (of most three options) stand together."""
    every = list(product(*(range(len(values)) for values in choices.values())))
    chosen = [at for at in every if sum(at) % 2 == 0 and (len(at) < 5 or sum(at[::2]) % 2 == 0)]
    return [{key: choices[key][i] for key, i in zip(choices, at, strict=True)} for at in chosen]


WIDE, EITHER = (None, torch.float32), (False, True)
SHARDED = options_of(hooks=EITHER, master=WIDE, reduce_dtype=WIDE, accumulate_dtype=WIDE)
REDUCED = options_of(
    early=EITHER, rebuild=EITHER, main_grads=EITHER, find_unused=EITHER, to_none=EITHER, bucket_bytes=(1, 4000)
)
REDUCED = [options for options in REDUCED if options["to_none"] or not options["find_unused"]]  # else None is zeros


def reducer(model, group, to_none, **options):
    from gradient_reducers import Reducer

    summed = Reducer(model, group, **options)

    def step(losses):
        model.zero_grad(set_to_none=to_none)
        with summed.no_sync():
            losses[0]().backward()
        losses[1]().backward()
        summed.finish()
        written = {name: p.main_grad if summed.main_grads else p.grad for name, p in model.named_parameters()}
        return {name: gradient for name, gradient in written.items() if gradient is not None}, {}

    return step


def sharded(kind, model, group, **options):
    units = {"units": model.layers} if "3" in kind.__name__ else {"bucket_bytes": 4000}
    zero = kind(model, torch.optim.AdamW(model.parameters(), lr=0.0), group, **units, **options)

    def step(losses):
        zero.zero_grad()
        for last, loss in enumerate(losses):
            with zero.micro_batch(last=bool(last)):
                loss().backward()
                for p in zero.names if not options["hooks"] else ():
                    zero.start(p)
        returned = zero.full_gradients()
        exact = sum(gradient.double().square().sum() for gradient in returned.values()).sqrt()
        norm = zero.clip_grad_norm(1e-3)
        assert abs(norm - exact) <= 1e-12 * exact, (
            f"dtypes in sums: {kind.__name__} {options}: norm {norm}, not {exact}"
        )
        zero.step()
        return dict(enumerate(zero.held()["gradients"])), returned

    return step


def owners_of_gradients():
    """What keeps gradients between two steps, with every set of its options: a name, and how to make it."""
    from zero3 import Zero3
    from zero_offload import Offload2, Offload3
    from zero_overlap import Overlapped1, Overlapped2
    from zero_stages import Zero1, Zero2

    kinds = (Zero1, Zero2, Zero3, Overlapped1, Overlapped2, Offload2, Offload3)
    yield from ((f"Reducer {options}", partial(reducer, **options)) for options in REDUCED)
    for kind, options in product(kinds, SHARDED):
        yield f"{kind.__name__} {options}", partial(sharded, kind, **options)


def overlapping(tensors):
    """Two names whose tensors share memory, or nothing."""
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in tensors.items() if t.numel())
    return [(first[2], second[2]) for first, second in pairwise(spans) if second[0] < first[1]]


def three_steps():
    """Steps on batches a, b, a, whose weights stay: the third has to leave what the first has left. One rank uses
    another parameter in b."""
    from _zero_demo import Decoder, make_batch, token_loss_sum

    class Sometimes(Decoder):
        def __init__(self):
            super().__init__(hidden=8, heads=2, layers=1)
            self.scale = torch.nn.Parameter(torch.ones(5))

        def forward(self, tokens):
            logits = super().forward(tokens)
            return logits * self.scale.mean() if self.uses_scale else logits

    group, found = group_of_the_slice(), []
    if group is None:
        return found

    def loss_of(model, pair):
        return lambda: token_loss_sum(model, *pair) / 32

    for name, make in owners_of_gradients():
        torch.manual_seed(0)
        model = Sometimes().bfloat16()
        step, steps = make(model, group), []
        for number in (0, 1, 0):
            model.uses_scale = number == 1 and group.rank() == 0
            batch = make_batch(number, group.size(), length=8)[group.rank()]
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


@pytest.mark.prove
def test_gradients_of_a_step_depend_on_its_batch_alone():
    for found in run_ranks(3, three_steps, timeout=120):
        assert not found, "\n".join(found)


# ------------------------------------------------------------------------------------------------ modes, and dtypes


def every_model():
    """Logits in other modes than training's: evaluated, a model drops nothing; float64 under autocast stays float64."""
    from moe_layer import MoEConfig
    from moe_llama import LlamaConfig, MoELlama
    from parallel_block import Config
    from parallel_linear import TensorParallel
    from parallel_llama import ParallelLlama

    group, found = group_of_the_slice(), []
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
    return found


def test_every_model_computes_in_evaluation_and_under_autocast_what_it_is_trained_to():
    for found in run_ranks(3, every_model):
        assert not found, "\n".join(found)


# ---------------------------------------------------------------------------------------------------------- borders


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
