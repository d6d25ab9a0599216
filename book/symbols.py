"""Where a named thing is: `03_zero/zero.py:Zero2.forward` and `03_zero/test_zero.py::test_...` as a line of a file.

Links of this book name things, and lines are looked up whenever a page is made: a link that leads
nowhere is an error.
"""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@cache
def symbols(file: Path) -> dict[str, int]:
    """Line of every function, class, method and top-level name of a Python file, by name or by Class.method."""
    found: dict[str, int] = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, NAMED):
            found[node.name] = node.lineno
            inner = node.body if isinstance(node, ast.ClassDef) else []
            found |= {f"{node.name}.{n.name}": n.lineno for n in inner if isinstance(n, NAMED)}
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        found |= {target.id: node.lineno for target in targets if isinstance(target, ast.Name)}
    return found


def place(name: str) -> tuple[str, str, int]:
    """(path from the root, symbol, line) of FILE:SYMBOL or FILE::TEST. LookupError names what is not there."""
    path, _, symbol = name.replace("::", ":").partition(":")
    if not (ROOT / path).is_file():
        raise LookupError(f"{name}: there is no file {path}")
    if symbol not in (known := symbols(ROOT / path)):
        raise LookupError(f"{name}: {path} has no {symbol}")
    return path, symbol, known[symbol]
