"""A formula is written once, as an expression of Python: computed by tests, shown as text, set as MathML in the book.

MathML because browsers set it by themselves: no library, no fonts, nothing to fetch. The formulas are few and small.
"""

import ast

LOOKS = {"Psi": "Ψ", "S_len": "S", "f_time": "f"}
OPEN, CLOSE = (f'<mo stretchy="false">{bracket}</mo>' for bracket in "()")


def evaluate(formula: str, symbols: dict[str, float]) -> float:
    """Its value. NameError for a symbol that has none."""
    return eval(compile(formula, formula, "eval"), {"__builtins__": {}, "min": min, "max": max}, symbols)


def names(formula: str) -> list[str]:
    """Its symbols, in the order in which a reader meets them."""
    found = (node for node in ast.walk(ast.parse(formula)) if isinstance(node, ast.Name))
    return list(dict.fromkeys(n.id for n in sorted(found, key=lambda n: n.col_offset) if n.id not in ("min", "max")))


def rank(node: ast.expr) -> int:
    """How tightly it binds: what binds less than the place it stands in needs brackets."""
    if isinstance(node, ast.BinOp):
        return 1 if isinstance(node.op, ast.Add | ast.Sub) else 2
    return 3


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

    def row(*parts: str) -> str:
        return f"<mrow>{''.join(parts)}</mrow>"

    def text(node: ast.expr, least: int = 0) -> str:
        made = inner(node)
        return row(OPEN, made, CLOSE) if rank(node) < least else made

    def inner(node: ast.expr) -> str:
        match node:
            case ast.Constant(value):
                return f"<mn>{value}</mn>"
            case ast.Name(name):
                return f"<mi>{LOOKS.get(name, name)}</mi>"
            case ast.Call(ast.Name(name), arguments):
                return row(f"<mi>{name}</mi>", OPEN, "<mo>,</mo>".join(map(text, arguments)), CLOSE)
            case ast.BinOp(left, ast.Add(), right):
                return row(text(left), "<mo>+</mo>", text(right))
            case ast.BinOp(left, ast.Sub(), right):
                return row(text(left), "<mo>−</mo>", text(right, 2))
            case ast.BinOp(left, ast.Mult(), right):
                return row(text(left, 2), '<mspace width="0.2em"/>', text(right, 2))
            case ast.BinOp(left, ast.Div(), right):
                return f"<mfrac>{row(text(left))}{row(text(right))}</mfrac>"
        raise ValueError(f"{formula}: {ast.dump(node)} cannot be set")

    return f'<math aria-label="{show(formula)}">{text(ast.parse(formula, mode="eval").body)}</math>'
