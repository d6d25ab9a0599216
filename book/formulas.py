"""A formula is written once: computed by tests, shown as text, set as MathML in the book.

Those of the cheat sheet are expressions of Python; those of the READMEs are text, `2(P−1)/P · n`, which `python` reads.
MathML because browsers set it by themselves: no library, no fonts, nothing to fetch. The formulas are few and small.
"""

import ast
import re

LOOKS = {"Psi": "Ψ", "S_len": "S", "f_time": "f"}
OPEN, CLOSE = (f'<mo stretchy="false">{bracket}</mo>' for bracket in "()")
SPACE = '<mspace width="0.2em"/>'

TIE = re.compile(r"<!-- formulas: (\w+) -->")  # above a table of formulas: what computes them
# Letters side by side are a word, but for the degrees of parallelism.
NAME = r"(?<![A-Za-z])(?:[dtcpe]p|[A-Za-z](?:_[a-z]+)?'?)(?![A-Za-z])|[Α-Ωα-ω]"
TOKEN = re.compile(rf"\s*(\d[\d,]*|log₂|{NAME}|[-+−·×/()⌈⌉²])")
WORDS = ("n/a", "B + W", "s + b")  # not applicable; the two halves of a backward; a score and its bias
ELSEWHERE = ("2 · 4 S D · S/C",)  # 09: of a way to sum dq that no code here takes


class NoFormulaError(ValueError):
    """A cell with words, or with names only."""


def tokens(cell: str) -> list[str]:
    found, at, text = [], 0, re.sub(r"[*`]", "", cell).strip()
    if text in WORDS + ELSEWHERE or re.fullmatch(r"[\d.]+(e[+-]\d+|[A-Z])", text):  # 1e+04, 70B
        raise NoFormulaError(cell)
    while at < len(text):
        token = TOKEN.match(text, at)
        if not token:
            raise NoFormulaError(cell)
        found.append(token[1])
        at = token.end()
    return found


def python(cell: str) -> str:
    """`2(P−1)/P · n` as Python, with the symbols as s["P"]; side by side means times, from left to right."""
    made: list[str] = []
    operand = False  # does an operand end here?
    calculates = False
    for token in tokens(cell):
        number, name = token[0].isdecimal(), token[0].isalpha() and token != "log₂"
        if number and operand:
            raise NoFormulaError(cell)  # a0 b1, 128 x 256
        if (name or number or token in "(⌈" or token == "log₂") and operand:
            made.append("*")
            calculates |= made[-2][0].isdecimal() or made[-2] == ")" or token in "(⌈"
        if number:
            made.append(token.replace(",", ""))
        elif name:
            made.append(f"s[{token!r}]")
        else:
            made.append(
                {"·": "*", "×": "*", "−": "-", "⌈": "ceil(", "⌉": ")", "²": "**2", "log₂": "log2 @"}.get(token, token)
            )
        calculates |= token in "-+−·×/²"
        operand = number or name or token in ")⌉²"
    if not calculates or not any(token[0].isalpha() for token in tokens(cell)):
        raise NoFormulaError(cell)
    return re.sub(r"log2 @ ?(s\['\w+'\])", r"log2(\1)", " ".join(made))


def is_formula(cell: str) -> bool:
    try:
        compile(python(cell), cell, "eval")
    except (NoFormulaError, SyntaxError):
        return False
    return True


def is_cell(cell: str) -> bool:
    """In a table of formulas; in another one letters only would be names."""
    return is_formula(cell) or bool(re.fullmatch("[A-Z]( [A-Z])*", cell.strip()))


def evaluate(formula: str, symbols: dict[str, float]) -> float:
    """Its value. NameError for a symbol that has none."""
    return eval(compile(formula, formula, "eval"), {"__builtins__": {}, "min": min, "max": max}, symbols)


def names(formula: str) -> list[str]:
    """Its symbols, in the order in which a reader meets them."""
    found = (node for node in ast.walk(ast.parse(formula)) if isinstance(node, ast.Name))
    return list(dict.fromkeys(n.id for n in sorted(found, key=lambda n: n.col_offset) if n.id not in ("min", "max")))


def rank(node: ast.expr) -> int:
    """How tightly it binds: what binds less than the place it stands in needs brackets."""
    if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Pow):
        return 1 if isinstance(node.op, ast.Add | ast.Sub) else 2
    return 3


def factors(node: ast.expr) -> list[ast.expr]:
    """Of a product, from left to right."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [*factors(node.left), node.right]
    return [node]


def is_fraction(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)


def show(formula: str) -> str:
    """As text: `2 g Ψ (N − 1)/N`."""

    def text(node: ast.expr, least: int = 0) -> str:
        made = inner(node)
        return f"({made})" if rank(node) < least else made

    def inner(node: ast.expr) -> str:
        match node:
            case ast.Constant(value):
                return str(value)
            case ast.Name(name):
                return LOOKS.get(name, name)
            case ast.Call(ast.Name(name), arguments):
                return f"{name}({', '.join(map(text, arguments))})"
            case ast.BinOp(left, ast.Add(), right):
                return f"{text(left)} + {text(right)}"
            case ast.BinOp(left, ast.Sub(), right):
                return f"{text(left)} − {text(right, 2)}"
            case ast.BinOp(left, ast.Mult(), right):
                return f"{text(left, 2)} {text(right, 2)}"
            case ast.BinOp(left, ast.Div(), right):
                return f"{text(left, 2)}/{text(right, 3)}"
        raise ValueError(f"{formula}: {ast.dump(node)} cannot be shown")

    return text(ast.parse(formula, mode="eval").body)


def mathml(formula: str) -> str:
    """As MathML, with the text as its accessible name."""
    return f'<math aria-label="{show(formula)}">{presentation(formula)}</math>'


def sides(line: str) -> str:
    """A line of a README as MathML, `idle / compute = (p − 1)/m` with words on a side; "" if it is something else."""
    parts = [part.strip() for part in line.strip().split("=")]
    told = [is_formula(part) or bool(re.fullmatch(r"[A-Za-z]{2}[A-Za-z /]+|[A-ZΨ]", part)) for part in parts]
    if len(parts) < 2 or not all(told) or not is_formula(parts[-1]):
        return ""
    made = [presentation(python(part)) if is_formula(part) else f"<mtext>{part}</mtext>" for part in parts]
    return f'<math display="block" aria-label="{" ".join(line.split())}">{"<mo>=</mo>".join(made)}</math>'


def cell_as_mathml(cell: str) -> str:
    letters = re.fullmatch("[A-Z]( [A-Z])*", cell.strip())
    formula = " * ".join(cell.split()) if letters else python(cell)
    return f'<math aria-label="{re.sub("[*`]", "", cell).strip()}">{presentation(formula)}</math>'


def presentation(formula: str) -> str:
    def row(*parts: str) -> str:
        return f"<mrow>{''.join(parts)}</mrow>"

    def text(node: ast.expr, least: int = 0) -> str:
        made = inner(node)
        return row(OPEN, made, CLOSE) if rank(node) < least else made

    def symbol(name: str) -> str:
        letter, _, index = LOOKS.get(name, name).replace("'", "′").partition("_")
        return f"<msub><mi>{letter}</mi><mi>{index}</mi></msub>" if index else f"<mi>{letter}</mi>"

    def product(parts: list[ast.expr]) -> str:
        made = text(parts[0], 2)
        for part in parts[1:]:  # two numbers side by side would be one
            made += f"<mo>·</mo>{text(part, 2)}" if isinstance(part, ast.Constant) else f"{SPACE}{text(part, 2)}"
        return made

    def inner(node: ast.expr) -> str:
        match node:
            case ast.Constant(value):
                return f"<mn>{value}</mn>"
            case ast.Name(name) | ast.Subscript(_, ast.Constant(name)):
                return symbol(name)
            case ast.Call(ast.Name("ceil"), [argument]):
                return row("<mo>⌈</mo>", text(argument), "<mo>⌉</mo>")
            case ast.Call(ast.Name("log2"), [argument]):
                return row("<msub><mi>log</mi><mn>2</mn></msub>", SPACE, text(argument, 3))
            case ast.Call(ast.Name(name), arguments):
                return row(f"<mi>{name}</mi>", OPEN, "<mo>,</mo>".join(map(text, arguments)), CLOSE)
            case ast.BinOp(left, ast.Add(), right):
                return row(text(left), "<mo>+</mo>", text(right))
            case ast.BinOp(left, ast.Sub(), right):
                return row(text(left), "<mo>−</mo>", text(right, 2))
            case ast.BinOp(left, ast.Pow(), right):
                return f"<msup>{row(text(left, 3))}{row(text(right))}</msup>"
            case ast.BinOp(_, ast.Mult(), _):
                return row(product(factors(node)))
            case ast.BinOp(left, ast.Div(), right):  # a/b · c/d is a product of two fractions
                parts = factors(left)
                at = max((i + 1 for i, part in enumerate(parts[:-1]) if is_fraction(part)), default=0)
                above = row(product(parts[at:])) if len(parts) > 1 else row(text(left))
                made = f"<mfrac>{above}{row(text(right))}</mfrac>"
                return row(product(parts[:at]), "<mo>·</mo>", made) if at else made
        raise ValueError(f"{formula}: {ast.dump(node)} cannot be set")

    return text(ast.parse(formula, mode="eval").body)
