"""A file of code as HTML: each line with its number, an anchor, and colours for comments, strings, words and numbers.

Five kinds of tokens and one regular expression; all files take a second. The names of the classes are Pygments',
so the theme colours them, in light and in dark.
"""

import html
import keyword
import re

BEGIN = re.compile(r"\s*(?:#|//) --- exercise (?P<name>[\d.]+)(?:: .*?)? ---\s*")
END = re.compile(r"\s*(?:#|//) --- end exercise ---\s*")
WORDS = {*keyword.kwlist, "match", "case", "self"}
CUDA = {"void", "int", "float", "double", "const", "template", "typename", "struct", "return", "for", "while", "if"}
CUDA |= {"else", "auto", "static", "extern", "unsigned", "size_t", "bool", "using", "constexpr"}
CUDA |= {"__global__", "__device__", "__shared__", "__syncthreads"}


def pattern(path: str) -> re.Pattern[str]:
    if path.endswith((".cu", ".cuh", ".h", ".js")):
        comment, words = r"//[^\n]*|/\*.*?\*/", CUDA
    else:
        comment, words = r"\#[^\n]*", WORDS
    string = r'[rbfu]{0,2}(?:"""(?:\\.|.)*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')'
    name = r"(?:(?<=def\s)|(?<=class\s))\w+"
    word = rf"\b(?:{'|'.join(sorted(words))})\b"
    return re.compile(
        rf"(?P<c1>{comment})|(?P<s>{string})|(?P<nf>{name})|(?P<k>{word})|(?P<mi>(?<![\w.])\d[\w.]*)", re.DOTALL
    )


def coloured(text: str, path: str) -> list[str]:
    """The lines as HTML. A token that goes on over several lines is coloured on each."""
    made, at = [], 0
    for token in pattern(path).finditer(text):
        made.append(html.escape(text[at : token.start()]))
        lines = html.escape(token[0]).split("\n")
        made.append("\n".join(f'<span class="{token.lastgroup}">{line}</span>' if line else "" for line in lines))
        at = token.end()
    made.append(html.escape(text[at:]))
    return "".join(made).rstrip("\n").split("\n")


def folded(plain: list[str], lines: list[str]) -> list[str]:
    """The lines with numbers and anchors. What an exercise asks for is closed until somebody clicks on it, or follows a
    link into it: who wants to read first can, and nobody has to."""
    made, inside = [], False
    for n, (text, line) in enumerate(zip(plain, lines, strict=True), 1):
        if inside and END.fullmatch(text):
            made.append("</details>")
            inside = False
        # a line's end lies inside it: between two blocks it would be a line of its own
        made.append(
            f'<span class="line" id="L{n}"><a href="#L{n}" aria-label="line {n}" data-n="{n}"></a>{line}\n</span>'
        )
        if found := BEGIN.fullmatch(text):
            count = next(i for i, later in enumerate(plain[n:]) if END.fullmatch(later))
            words = html.escape(f"the {count} lines of exercise {found['name']}")
            made.append(f'<details class="solution"><summary>{words}</summary>')
            inside = True
    return made


def numbered(text: str, path: str) -> str:
    """One block of HTML without a blank line, which would end it for Markdown."""
    lines = "".join(folded(text.rstrip("\n").split("\n"), coloured(text, path)))
    label = html.escape(f"source of {path}")
    head = f'<div class="highlight" tabindex="0" role="region" aria-label="{label}">'
    return f"{head}<pre><code>{lines}</code></pre></div>"
