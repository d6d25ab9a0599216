"""A formula is written once: computed by tests, shown as text, set as MathML in the book.

Those of the cheat sheet are expressions of Python; those of the READMEs are text, `2(P−1)/P · n`, which `python` reads.
Lines of their own may also have functions, names of several letters and words; `lines_as_mathml` sets them.
MathML because browsers set it by themselves: no library, no fonts, nothing to fetch. The formulas are few and small.
"""

import ast
import html
import keyword
import re
from itertools import pairwise

LOOKS = {"Psi": "Ψ", "S_len": "S", "f_time": "f"}
OPEN, CLOSE = (f'<mo stretchy="false">{bracket}</mo>' for bracket in "()")
SPACE, GAP = '<mspace width="0.2em"/>', '<mspace width="2em"/>'

TIE = re.compile(r"<!-- formulas: (\w+) -->")  # above a table of formulas: what computes them
# Letters side by side are a word, but for the degrees of parallelism.
NAME = r"(?<![A-Za-z])(?:[dtcpe]p|[A-Za-z](?:_[a-z]+)?'?)(?![A-Za-z])|[Α-Ωα-ω]"
TOKEN = re.compile(rf"\s*(\d[\d,]*|log₂|{NAME}|[-+−·×/()⌈⌉²])")
WORDS = ("n/a", "B + W", "s + b")  # not applicable; the two halves of a backward; a score and its bias
# What lines have besides: sums, words that stand for a number, names of several letters, and functions before their (
SAID = r"[A-Za-z]{2,}(?:-[a-z]+)* [a-z]{2,}(?:[ -][A-Za-z]\w*)*|[a-z]+(?:-[a-z]+)+|[A-Za-z]+/s\b"
LONG = r"√?[A-Za-zΑ-Ωα-ω][A-Za-z0-9]*(?:_\w+)?(?:['ᵀ]|\*(?= |$))?\(?"
IN_LINES = re.compile(rf"\s*(sum over .+? of\b|{SAID}|\d+(?:\.\d+)?|{LONG}|[-+−·×∗/(),²])")
RELATION = re.compile(r"(?<![-<=>]) ([=≥≤<>]) ")
DOT = {"·": "%"}  # as strong as *, and shown
ELSEWHERE = ("2 · 4 S D · S/C",)  # 09: of a way to sum dq that no code here takes


class NoFormulaError(ValueError):
    """A cell with words, or with names only."""


def tokens(cell: str) -> list[str]:
    text = re.sub(r"[*`]", "", cell).strip()
    if text in WORDS + ELSEWHERE or re.fullmatch(r"[\d.]+(e[+-]\d+|[A-Z])", text):  # 1e+04, 70B
        raise NoFormulaError(cell)
    return cut(text, TOKEN)


def cut(text: str, pattern: re.Pattern) -> list[str]:
    found, at = [], 0
    while at < len(text):
        token = pattern.match(text, at)
        if not token:
            raise NoFormulaError(text)
        if keyword.iskeyword(token[1]):
            raise NoFormulaError(text)  # pseudo-code
        found.append(token[1])
        at = token.end()
    return found


def python(cell: str) -> str:
    """`2(P−1)/P · n` as Python, with the symbols as s["P"]; side by side means times, from left to right."""
    found = tokens(cell)
    made, calculates = spelled(found)
    if not calculates or not any(token[0].isalpha() for token in found):
        raise NoFormulaError(cell)
    return made


def spelled(found: list[str]) -> tuple[str, bool]:
    """Tokens as Python, and whether they calculate."""
    made: list[str] = []
    operand = False  # does an operand end here?
    calculates = False
    for token in found:
        number, name = token[0].isdecimal(), (token[0].isalpha() or token[0] == "√") and token != "log₂"
        if number and operand:
            raise NoFormulaError(token)  # a0 b1, 128 x 256
        if (name or number or token in "(⌈" or token == "log₂") and operand:
            made.append("*")
            calculates |= made[-2][0].isdecimal() or made[-2] == ")" or token in "(⌈"
        if number:
            made.append(token.replace(",", ""))
        elif name:
            made.append(f"s[{token.rstrip('(')!r}]" + "(" * token.endswith("("))
        else:
            made.append(
                {"·": "*", "×": "*", "−": "-", "∗": "@", "⌈": "ceil(", "⌉": ")", "²": "**2", "log₂": "log2 @"}.get(
                    token, token
                )
            )
        calculates |= token in "-+−·×∗/²%" or token.startswith("sum over ")
        operand = number or (name and not token.endswith("(")) or token in ")⌉²"
    return re.sub(r"log2 @ ?(s\['\w+'\])", r"log2(\1)", " ".join(made)), calculates


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
        return 1 if isinstance(node.op, ast.Add | ast.Sub | ast.MatMult) else 2
    return 3


def factors(node: ast.expr) -> list[ast.expr]:
    """Of a product, from left to right."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Mod):
        node.right.dotted = isinstance(node.op, ast.Mod)
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


def sides(cell: str) -> list[str]:
    """The sides of an equation, `p = exp(x − m)`, as MathML, each with its relation before it; of words one."""
    parts = RELATION.split(cell.rstrip(",:"))
    try:
        found = [spelled([DOT.get(token, token) for token in cut(part, IN_LINES)]) for part in parts[::2]]
        made = [presentation(code) for code, _ in found]
    except (ValueError, SyntaxError):
        made = []
    if not made or not (len(made) > 1 or found[0][1]):
        return [f"<mtext>{html.escape(cell)}</mtext>"]
    made = [made[0], *(f"<mo>{html.escape(by)}</mo>{part}" for by, part in zip(parts[1::2], made[1:], strict=True))]
    return [*made[:-1], made[-1] + f"<mtext>{cell[-1]}</mtext>" * cell.endswith((",", ":"))]


def is_set(cell: str) -> bool:
    return not sides(cell)[0].startswith("<mtext>")


def cells(line: str) -> list[str]:
    """Of a line: formulas side by side, words between them, a remark at the end."""
    close = re.sub(" *( =) +| ?( [≥≤+−/·×∗]) +", lambda found: f"{found[1] or found[2]} ", line.strip())
    return re.split(r" {2,}|(?<=\),) ", close)


def is_line(line: str) -> bool:
    """Has it a formula, and nothing else than words before it and a remark behind it?"""
    *before, last = cells(line)
    words = all(is_set(cell) or re.fullmatch("[A-Za-z ,-]*", cell) for cell in before)
    return any(map(is_set, [*before, last])) and words and (is_set(last) or not re.search("[|<>]", last))


def lines_as_mathml(lines: list[str]) -> str:
    """Indented lines of a README, `idle / compute = (p − 1)/m`, as MathML; "" if one of them is something else.

    What stands side by side in a lone line may wrap; several lines are a table, aligned at the first `=` of each.
    """
    if not all(map(is_line, lines)) or not re.search("[+−·×∗/Σ]|sum over ", "".join(lines)):
        return ""
    made = []
    for line in lines:
        row = [sides(cell) for cell in cells(line)]
        whole = ["".join(parts) for parts in row]
        at = next((i for i, (_, *more) in enumerate(row) if more and not whole[i].endswith(":</mtext>")), 0)
        columns = [GAP.join(whole[:at]), row[at][0], "".join(row[at][1:]), GAP.join(whole[at + 1 :])]
        made.append(f"<mtr>{''.join(f'<mtd>{column}</mtd>' for column in columns)}</mtr>")
    if len(lines) > 1:
        name = html.escape("; ".join(" ".join(line.split()) for line in lines))
        inside = f'<math aria-label="{name}"><mtable>{"".join(made)}</mtable></math>'
    else:
        inside = " ".join(
            f'<math aria-label="{html.escape(cell)}">{"".join(sides(cell))}</math>'
            if is_set(cell)
            else f"<span>{html.escape(cell)}</span>"
            for cell in cells(lines[0])
        )
    return f'<div class="formulas">{inside}</div>'


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
        if over := re.fullmatch("sum over (.*) of", name):
            return f"<munder><mo>∑</mo>{row(said(over[1]))}</munder>"
        if re.search("[ /-]", name):
            return row(said(name))
        if name[0] == "√":
            return f"<msqrt>{symbol(name[1:])}</msqrt>"
        if name[-1] in "ᵀ*":
            return f"<msup>{symbol(name[:-1])}<mi>{name[-1].replace('ᵀ', 'T')}</mi></msup>"
        if name == "Σ":
            return "<mo>∑</mo>"
        name = re.sub(r"^([A-Za-z])(\d+)$", r"\1_\2", LOOKS.get(name, name)).replace("'", "′")
        letter, _, index = name.partition("_")
        if min(len(letter), len(index)) != 1:
            return f"<mi>{name}</mi>"
        return f"<msub><mi>{letter}</mi><mi>{index}</mi></msub>"

    def said(words: str) -> str:
        """Words, and the letters among them as symbols."""
        parts = re.split(r"(?<![\w/-])(?!a\b)([A-Za-z](?:_\w+)?)(?![\w/-])", words.replace(" ", "\N{NO-BREAK SPACE}"))
        return "".join(symbol(part) if i % 2 else f"<mtext>{part}</mtext>" for i, part in enumerate(parts) if part)

    def product(parts: list[ast.expr]) -> str:
        made = text(parts[0], 2)
        for left, right in pairwise(parts):
            made += between(left, right) + text(right, 2)
        return made

    def between(left: ast.expr, right: ast.expr) -> str:
        """What keeps two factors apart: two numbers side by side would be one, and so would two words."""
        named = [node.slice.value for node in (left, right) if isinstance(node, ast.Subscript)]
        if any(re.search("[ /-]", name) and not name.startswith("sum over ") for name in named):
            return "<mo>×</mo>"
        return "<mo>·</mo>" if isinstance(right, ast.Constant) or getattr(right, "dotted", False) else SPACE

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
            case ast.Call(function, arguments):
                return row(text(function), OPEN, "<mo>,</mo>".join(map(text, arguments)), CLOSE)
            case ast.UnaryOp(ast.USub(), operand):
                return row("<mo>−</mo>", text(operand, 3))
            case ast.BinOp(left, ast.Add(), right):
                return row(text(left), "<mo>+</mo>", text(right))
            case ast.BinOp(left, ast.Sub(), right):
                return row(text(left), "<mo>−</mo>", text(right, 2))
            case ast.BinOp(left, ast.Pow(), right):
                return f"<msup>{row(text(left, 3))}{row(text(right))}</msup>"
            case ast.BinOp(_, ast.Mult() | ast.Mod(), _):
                return row(product(factors(node)))
            case ast.BinOp(left, ast.MatMult(), right):
                return row(text(left, 2), "<mo>∗</mo>", text(right, 3))
            case ast.BinOp(left, ast.Div(), right):  # a/b · c/d is a product of two fractions
                parts = factors(left)
                at = max((i + 1 for i, part in enumerate(parts[:-1]) if is_fraction(part)), default=0)
                above = row(product(parts[at:])) if len(parts) > 1 else row(text(left))
                made = f"<mfrac>{above}{row(text(right))}</mfrac>"
                return row(product(parts[:at]), "<mo>·</mo>", made) if at else made
        raise ValueError(f"{formula}: {ast.dump(node)} cannot be set")

    return text(ast.parse(formula, mode="eval").body)
