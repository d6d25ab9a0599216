"""Find the exercises in a script, take their bodies out, put other bodies in.

An exercise is the text between two comment lines of a chapter's script:

    # --- exercise 2.3: words ---
    ...                                  its body: whole statements
    # --- end exercise ---

A CUDA file has `//` instead of `#`. Everything here works on text, line by line, so that a file with a syntax
error in one exercise still has its others.
"""

import ast
import json
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass

BEGIN = re.compile(r"^( *)(#|//) --- exercise ([\d.]+)(?:: (.*?))? ---\s*$")
END = re.compile(r"^ *(#|//) --- end exercise ---\s*$")


@dataclass(frozen=True)
class Fence:
    """One exercise in one file. Lines are counted from 1, as editors do; `first` and `last` are the comment lines."""

    number: str  # "2.3"
    title: str
    first: int
    last: int
    indent: str
    body: str  # the lines between, unchanged, without the indent of the fence
    inside: str  # "BucketedReducer.make_buckets", "" at the top level of the file and in CUDA
    cuda: bool = False


def read_fences(text: str) -> tuple[dict[str, Fence], list[str]]:
    """The exercises of a file by number, and what is wrong with its fences, one line each."""
    fences: dict[str, Fence] = {}
    problems: list[str] = []
    lines = text.splitlines()
    begun: tuple[int, re.Match[str]] | None = None
    for number, line in enumerate(lines, 1):
        if match := BEGIN.match(line):
            if begun:
                problems.append(f"line {number}: exercise {match[3]} begins before {begun[1][3]} has ended")
            begun = number, match
        elif END.match(line):
            if begun is None:
                problems.append(f"line {number}: an exercise ends here that has not begun")
                continue
            first, match = begun
            begun = None
            if match[3] in fences:
                problems.append(f"line {first}: exercise {match[3]} is there a second time")
                continue
            indent = match[1]
            body = [row.removeprefix(indent) for row in lines[first : number - 1]]
            inside, cuda = enclosing(lines, first), match[2] == "//"
            fences[match[3]] = Fence(match[3], match[4] or "", first, number, indent, "\n".join(body), inside, cuda)
    if begun:
        problems.append(f"line {begun[0]}: exercise {begun[1][3]} has no `{begun[1][2]} --- end exercise ---`")
    return fences, problems


def enclosing(lines: list[str], line: int) -> str:
    """The function or class around a line, as "Class.method". By indentation, as the file may not parse."""
    names: list[str] = []
    depth = len(lines[line - 1]) - len(lines[line - 1].lstrip())
    for above in reversed(lines[: line - 1]):
        match = re.match(r"( *)(?:async )?(?:def|class) (\w+)", above)
        if match and len(match[1]) < depth:
            names.insert(0, match[2])
            depth = len(match[1])
    return ".".join(names)


def splice(text: str, bodies: Mapping[str, str]) -> str:
    """The file with these bodies, by number, in place of its own; all other lines unchanged."""
    fences, _ = read_fences(text)
    lines = text.splitlines()
    for number in sorted(bodies, key=lambda n: -fences[n].first):  # from the end, so that line numbers stay true
        fence = fences[number]
        lines[fence.first : fence.last - 1] = textwrap.indent(bodies[number], fence.indent).split("\n")
    return "\n".join(lines) + "\n"


def outside(text: str) -> list[tuple[int, str]]:
    """The lines that belong to no exercise, with their numbers; a fence is reduced to its number."""
    fences, _ = read_fences(text)
    inner = {n for fence in fences.values() for n in range(fence.first + 1, fence.last)}
    lines = [(n, line.rstrip()) for n, line in enumerate(text.splitlines(), 1) if n not in inner]
    return [(n, f"exercise {match[3]}" if (match := BEGIN.match(line)) else line) for n, line in lines]


# ------------------------------------------------------------------------------------------------ bodies as programs


def parse(body: str) -> list[ast.stmt]:
    """The statements of a body. SyntaxError with the line counted from the first line of the body."""
    wrapped = "def body():\n" + textwrap.indent(body, "    ") + "\n    pass\n"
    try:
        function = ast.parse(wrapped).body
    except SyntaxError as error:
        error.lineno = min((error.lineno or 2) - 1, body.count("\n") + 1)
        raise
    if len(function) != 1 or not isinstance(function[0], ast.FunctionDef):  # a line without any indent broke out
        raise SyntaxError("a line has less indent than its fence", (None, 1, 0, None))
    return function[0].body[:-1]


def normal(body: str, cuda: bool = False) -> str:
    """The same text for two bodies that are the same program: comments, layout and docstrings do not count."""
    if cuda:
        return " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", " ", body, flags=re.DOTALL).split())
    statements = parse(body)
    for node in [n for s in statements for n in ast.walk(s)]:
        if isinstance(inner := getattr(node, "body", None), list) and len(inner) > 1 and _is_text(inner[0]):
            inner.pop(0)
    return "\n".join(ast.unparse(s) for s in statements if not _is_text(s))


def is_stub(fence: Fence, body: str) -> bool:
    """Whether nothing has been written yet: the body is empty or as `start` left it."""
    try:
        return normal(body, fence.cuda) in ("", "pass", "...", normal(stub(fence), fence.cuda))
    except SyntaxError:
        return False


def stub(fence: Fence) -> str:
    """What `start` puts in place of a body: NotImplementedError, naming the exercise. A compiler stops there."""
    if fence.cuda:
        return f"#error exercise {fence.number}: {fence.title}"
    message = json.dumps(f"exercise {fence.number}: {fence.title}", ensure_ascii=False)
    return rewrite(fence.body, lambda _: f"raise NotImplementedError({message})")


def rewrite(body: str, change: Callable[[str], str]) -> str:
    """`change(statements) -> statements`, applied to a body, or to each function in it if it only defines functions.

    Signatures and docstrings of functions stay: they say what is asked.
    """
    statements = parse(body)
    if not statements or not all(isinstance(s, (ast.FunctionDef, ast.ClassDef)) or _is_text(s) for s in statements):
        return change(body)
    lines = body.splitlines()
    functions = [node for s in statements for node in ast.walk(s) if isinstance(node, ast.FunctionDef)]
    nested = {id(n) for f in functions for n in ast.walk(f) if n is not f}
    for function in sorted((f for f in functions if id(f) not in nested), key=lambda f: -f.lineno):
        own = function.body[1:] if _is_text(function.body[0]) else function.body
        first, last = (own[0].lineno, function.body[-1].end_lineno) if own else (0, function.body[-1].end_lineno)
        assert last is not None  # as for `end_lineno` of every parsed node
        # Line numbers are those of the wrapped text: one more, with four spaces more.
        indent = " " * (function.body[0].col_offset - 4)
        rows = textwrap.dedent("\n".join(lines[first - 2 : last - 1])) if own else ""
        lines[(first if own else last + 1) - 2 : last - 1] = textwrap.indent(change(rows), indent).splitlines()
    return "\n".join(lines)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(getattr(statement.value, "value", None), str)
