"""Core files are plain: one statement per line, at most 100 columns, and the field's own words.

A reader takes in one idea per line. What is refused here is what makes a line hold two.
"""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from harness.layout import ROOT

CORE = [
    "01_single_gpu/single_gpu.py",
    "02_data_parallel/data_parallel.py",
    "03_zero/zero.py",
    "04_tensor_parallel/tensor_parallel.py",
    "05_context_parallel/ring_attention.py",
    "05_context_parallel/ulysses.py",
    "06_pipeline_parallel/pipeline_parallel.py",
    "07_expert_parallel/expert_parallel.py",
    "08_fpdt/fpdt.py",
    "09_kernels/flash_attention.py",
    "10_mixed_precision/mixed_precision.py",
    "11_5d_trainer/five_d.py",
]

COLUMNS, NODES = 100, 25
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
CONTAINERS = {"ModuleList", "ModuleDict", "Sequential", "Parameter"}
EXITS = {"exit", "_exit", "error"}

# What a word is called elsewhere. In core files, their READMEs and figures.
NEVER = {
    r"whoever|nobody|somebody": "the rank, tensor or function",
    r"mended|the mend": "fixed, the fix",
    r"ground floor": "core file",
    r"oracle|referee": "reference run, independent implementation",
    r"under way|on (its|their) way": "in flight",
    r"travels?": "is sent",
    r"numbers (a|per) token": "elements per token",
    r"whole weights?": "full weight",
    r"comes? and goe?s?": "unshard and reshard",
    r"in backward\b(?! (pass|hook))": "in the backward pass",
    r"nccl|gloo": "NCCL, Gloo",
}


def words(text: str) -> list[tuple[int, str]]:
    """Line and message for each word that has a standard term.

    Code in quotes or backticks keeps its own spelling, and a measured table the words of the commit that measured it.
    """
    text = re.sub(
        r"<!-- results:.*?<!-- end results -->", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL
    )
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        prose = re.sub(r"`[^`]*`|\"[^\"]*\"|'[^']*'|<!--.*?-->|\]\([^)]*\)", "", line)
        for never, instead in NEVER.items():
            flags = 0 if never == "nccl|gloo" else re.IGNORECASE
            if match := re.search(rf"\b({never})\b", prose, flags):
                found.append((number, f"says {match[0]!r}; better: {instead}"))
    return found


def nodes_by_line(tree: ast.AST) -> Counter[int]:
    return Counter(n.lineno for n in ast.walk(tree) if isinstance(n, (ast.expr, ast.stmt)))


def packs_tuples(node: ast.Assign) -> bool:
    """`a, b = c, d`, unless it swaps or shifts."""
    left, right = node.targets[0], node.value
    if not (isinstance(left, ast.Tuple) and isinstance(right, ast.Tuple)):
        return False
    return not {ast.unparse(x) for x in left.elts} & {ast.unparse(x) for x in right.elts}


def called(node: ast.AST) -> str:
    """The last part of the name of what is called; "" for anything but a call."""
    if not isinstance(node, ast.Call):
        return ""
    return ast.unparse(node.func).rpartition(".")[2]


def findings(text: str) -> list[tuple[int, str]]:
    """Line and message for each thing that a core file must not contain."""
    tree = ast.parse(text)
    found = words(text)
    found += [(n, f"{len(line)} columns") for n, line in enumerate(text.splitlines(), 1) if len(line) > COLUMNS]
    found += [(n, f"{count} expressions on one line") for n, count in nodes_by_line(tree).items() if count > NODES]
    statements = Counter(n.lineno for n in ast.walk(tree) if isinstance(n, ast.stmt))
    found += [(n, "two statements on one line") for n, count in statements.items() if count > 1]
    conditions = {id(n) for t in ast.walk(tree) if isinstance(t, (ast.If, ast.While)) for n in ast.walk(t.test)}
    modules = Counter[int]()
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Assign) and packs_tuples(node):
            found.append((line, "packs a tuple into a tuple"))
        if isinstance(node, ast.NamedExpr) and id(node) not in conditions:
            found.append((line, "walrus outside the condition of if or while"))
        if isinstance(node, COMPREHENSIONS):
            inside = [n for n in ast.walk(node) if n is not node and isinstance(n, COMPREHENSIONS)]
            if inside or len(node.generators) > 1:
                found.append((line, "comprehension with two loops"))
        if isinstance(node, ast.Expr) and isinstance(node.value, COMPREHENSIONS):
            found.append((line, "comprehension for its side effects"))
        if isinstance(node, ast.IfExp) and any(
            isinstance(part, ast.IfExp) for part in (node.test, node.body, node.orelse)
        ):
            found.append((line, "a conditional in a conditional"))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.left, ast.List):
            conditional = isinstance(node.right, (ast.Compare, ast.BoolOp, ast.UnaryOp))
            found += [(line, "a list times a condition")] * conditional
        if isinstance(node, ast.BoolOp) and any(called(value) in EXITS for value in node.values):
            found.append((line, "an exit chained by and / or"))
        if isinstance(node, ast.Call) and re.fullmatch(r"nn\.[A-Z]\w+", ast.unparse(node.func)):
            modules[line] += called(node) not in CONTAINERS
    found += [(n, "two modules made on one line") for n, count in modules.items() if count > 1]
    return sorted(found)


@pytest.mark.parametrize("name", CORE)
def test_a_core_file_is_plain(name):
    found = [f"{name}:{line}: {what}" for line, what in findings((ROOT / name).read_text())]
    assert not found, "\n".join(found)


def test_the_lesson_and_figures_of_a_core_file_use_the_fields_words():
    texts = {}
    for chapter in {Path(name).parent for name in CORE}:  # in depth a README keeps the words of the code there
        texts[chapter / "README.md"] = (ROOT / chapter / "README.md").read_text().partition("\n## In depth")[0]
        texts |= {f.relative_to(ROOT): f.read_text() for f in (ROOT / chapter / "figures").glob("*.svg")}
    found = [f"{name}:{line}: {what}" for name, text in texts.items() for line, what in words(text)]
    assert not found, "\n".join(found)


def functions(name: str) -> dict[str, str]:
    """The source of each top-level function of a file, without comments."""
    return {n.name: ast.unparse(n) for n in ast.parse((ROOT / name).read_text()).body if isinstance(n, ast.FunctionDef)}


def test_all_core_files_start_and_refuse_in_the_same_way():
    """What one test shows of these functions holds for all files: a rank per GPU, a limit of a minute, one line."""
    pattern = functions("03_zero/zero.py")
    for name in sorted(set(CORE) - {"01_single_gpu/single_gpu.py"}):
        found = functions(name)
        assert found["fail"] == pattern["fail"], name
        if "init_process_group" not in (ROOT / name).read_text():
            continue
        if name.startswith("06"):  # it passes `device_id`, which its own test is about
            continue
        assert found["init_distributed"] == pattern["init_distributed"], name
        assert (ROOT / name).read_text().count("init_process_group") == 1, name


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("a, b = c, d", "packs a tuple"),
        ("print(n := 3)", "walrus outside"),
        ("x = [a for b in c for a in b]", "two loops"),
        ("x = [[a for a in b] for b in c]", "two loops"),
        ("[f(a) for a in b]", "side effects"),
        ("x = a if b else c if d else e", "a conditional in a conditional"),
        ("x = ['--flag'] * (n > 1)", "a list times a condition"),
        ("ok or sys.exit('no')", "an exit chained"),
        ("x = nn.Sequential(nn.Linear(1, 1), nn.ReLU())", "two modules"),
        ("x = 1; y = 2", "two statements"),
        ("if x: y = 2", "two statements"),
        (f"x = '{'y' * 100}'", "106 columns"),
        ("x = [" + ", ".join(["f(a)"] * 13) + "]", "expressions on one line"),
        ("# the shard is on its way to nobody", "says 'nobody'"),
        ("# the same with gloo", "says 'gloo'"),
    ],
)
def test_what_makes_a_line_hold_two_ideas_is_found(code, message):
    assert any(message in what for _, what in findings(code)), findings(code)


@pytest.mark.parametrize(
    "code",
    [
        "a, b = b, a",
        "q, k, v = project(x)",
        "if (n := len(x)) > 3:\n    pass",
        "x = [a for a in b if a]",
        "layers = nn.ModuleList([nn.Linear(1, 1) for _ in range(3)])",
        "dist.init_process_group('nccl')",
        "for a in b:\n    f(a)",
    ],
)
def test_what_is_plain_passes(code):
    assert findings(code) == []


def on_the_front_page(language: str) -> str:
    return re.search(rf"^```{language}\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)[1]


def test_the_code_on_the_front_page_is_that_of_the_file_and_no_exercise():
    source, shown = (ROOT / "02_data_parallel/data_parallel.py").read_text(), on_the_front_page("python")
    before, found, _ = source.partition(shown)
    assert found and before.count("# --- exercise") == before.count("# --- end exercise")


@pytest.mark.prove
def test_the_output_on_the_front_page_is_what_the_file_prints():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*torchrun, str(ROOT / "02_data_parallel/data_parallel.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=120
    )
    assert done.returncode == 0, done.stderr[-1000:]
    shown, said = on_the_front_page("text").splitlines(), done.stdout.splitlines()
    # The errors, and how many messages were early, differ from run to run.
    for one, other in zip(shown, said, strict=True):
        a, b = one.split(), other.split()
        assert a == b or (a[0] == b[0] and a[2] == b[2] and a[4:] == b[4:]), other
