"""Nets: properties of all chapters' functions, one for each family of bugs. A message names its family first."""

import ast
import re

import pytest
from harness.layout import CHAPTERS, TRAINER, files

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
    *("make_groups", "node_groups", "usp_groups", "expert_groups", "make_mesh", "make_rank", "generate"),
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
