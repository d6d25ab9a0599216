"""Pages from READMEs: links, anchors, names that lead to lines; the colours of code; and every link of every README."""

import html
import re

import lessons
import pytest
from build_book import Book, ground_files
from colours_of_code import coloured, numbered
from formulas import cell_as_mathml, lines_as_mathml
from lessons import anchors, ground_section, lesson, links, names_of, page_of, slug
from symbols import ROOT, symbols

READMES = sorted(path for path in lessons.tracked() if path.endswith(".md") and not path.startswith("book/play/"))


def as_told(target: str, fragment: str) -> str:
    return f"<{target}{'#' * bool(fragment)}{fragment}>"


def test_files_folders_and_readmes_have_pages():
    assert page_of("README.md") == page_of(".") == "index.md"
    assert page_of("03_zero/README.md") == page_of("03_zero") == page_of("03_zero/") == "03_zero/index.md"
    assert page_of("03_zero/zero.py") == "03_zero/zero.py.md"
    assert page_of("book/cheat_sheet.md") == "cheat_sheet.md"
    assert page_of("11_5d_trainer/planner/clusters") == "11_5d_trainer/planner/clusters/files.md"
    assert page_of("03_zero/figures/timeline.svg") == "03_zero/figures/timeline.svg"


def test_a_copy_without_git_has_its_files_in_whichever_folder_it_lies(tmp_path, monkeypatch):
    for path in ("student/site/README.md", "student/site/runs/log.md"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
    monkeypatch.setattr(lessons, "ROOT", tmp_path / "student" / "site")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert lessons.tracked.__wrapped__() == {"README.md"}


def test_a_heading_has_the_anchor_of_a_code_host():
    assert slug("`Zero1`: the update, between two halves") == "zero1-the-update-between-two-halves"
    assert slug("6. The [last](x.md) gather") == "6-the-last-gather"
    assert anchors("# A b\n```\n# no\n```\n## A b\n### A b\n") == ["a-b", "a-b-1", "a-b-2"]


def test_links_are_rewritten_from_where_the_readme_lies():
    text = "[a](../04_tensor_parallel/README.md#x) ![b\nc](figures/timeline.svg) [d](https://x.org/a) [e](#f) [g](#h)"
    made = lesson("03_zero/README.md", text, as_told)
    assert "[a](<04_tensor_parallel/README.md#x>)" in made
    assert "![b\nc](<03_zero/figures/timeline.svg>)" in made
    assert "[d](https://x.org/a) [e](#f)" in made
    assert "[e](<03_zero/README.md#f>)" in lesson("03_zero/README.md", text, as_told, at="03_zero/zero.py.md")


def test_a_name_in_backquotes_leads_to_the_line_that_defines_it():
    line = symbols(ROOT / "03_zero/zero.py")["Zero2"]
    made = lesson(
        "03_zero/README.md", "`Zero2`, `zero.py`, `ZeroX`, `N`, [`Zero2`](x.md), `Zero2(layers, group)`", as_told
    )
    assert made.startswith(
        f"[`Zero2`](<03_zero/zero.py#L{line}>){{.to-code}}, [`zero.py`](<03_zero/zero.py>){{.to-code}}"
    )
    assert "`ZeroX`, `N`, [`Zero2`](<03_zero/x.md>)" in made
    assert f"[`Zero2(layers, group)`](<03_zero/zero.py#L{line}>)" in made


def test_a_name_that_two_classes_have_leads_nowhere():
    assert "forward" not in names_of("03_zero")
    assert names_of("03_zero")["Zero3.forward"] == "03_zero/zero.py:Zero3.forward"


def test_fences_and_headings_stay_and_folded_answers_are_still_markdown():
    text = "# `Zero2`\n\n```\n`Zero2` [a](b.md)\n```\n\n"
    text += "<details>\n<summary>q `Zero2`</summary>\n\na\n</details>\n<!-- x -->\n"
    made = lesson("03_zero/README.md", text, as_told)
    assert made.startswith("# `Zero2` {#zero2}\n\n```\n`Zero2` [a](b.md)\n```\n")
    assert '<details markdown="1">\n<summary markdown="span">q [`Zero2`]' in made
    assert "<!--" not in made


def test_comments_of_a_wide_block_of_commands_come_above_their_commands():
    few = "```sh\nmake a  # b\n```\n"
    assert lesson("README.md", few, as_told) == few
    wide = f"```sh\n# c\nmake a{' ' * 60}# b  # d\nmake \\\n    e\n```\n"
    assert lesson("README.md", wide, as_told) == "```sh\n# c\n# b  # d\nmake a\nmake \\\n    e\n```\n"
    drawing = wide.replace("```sh", "```")
    assert lesson("README.md", drawing, as_told) == drawing


def test_formulas_of_a_readme_are_set_as_mathml_with_their_text_as_a_name():
    text = "<!-- formulas: x -->\n\n| a b | 2(P−1)/P · n | H |\n\n| a | 2 P | H |\n"
    text += "\n    idle / compute = (p − 1)/m\n\n    x = f(y)\n"
    made = lesson("README.md", text, as_told)
    fraction = '<mfrac><mrow>2<mspace width="0.2em"/><mrow>(<mrow>P−1</mrow>)</mrow></mrow><mrow>P</mrow></mfrac>'
    plain = re.sub(r"</?m[ion]\b[^>]*>", "", made)
    assert f'| a b | <math aria-label="2(P−1)/P · n"><mrow>{fraction}<mspace width="0.2em"/>n</mrow></math> |' in plain
    assert '<math aria-label="H">H</math> |\n\n| a | 2 P | H |\n' in plain, "another table has names, not formulas"
    assert '\n<div class="formulas"><math aria-label="idle / compute = (p − 1)/m"><mfrac>' in plain
    assert "<mrow>idle</mrow><mrow>compute</mrow></mfrac>=<mfrac>" in plain
    assert made.endswith("\n\n    x = f(y)\n")


def texts(made: str) -> list[list[str]]:
    """Of each row and cell of a table, the letters."""
    rows = re.findall("<mtr>(.*?)</mtr>", made)
    return [
        [re.sub("<[^>]*>", "", html.unescape(cell)) for cell in re.findall("<mtd>(.*?)</mtd>", row)] for row in rows
    ]


def test_a_block_whose_lines_are_all_formulas_is_a_table_aligned_at_the_equals_signs():
    made = lines_as_mathml(
        [
            "    y = sum over the chosen e of g_e f(x)",
            "    K > 1:   g_e = p_e / (sum of the K chosen p)     Mixtral",
            "    bytes of all   = 4 K (ep − 1)/ep · (bytes of an element), both ways",
        ]
    )
    assert [[cell.replace("\N{NO-BREAK SPACE}", " ") for cell in row] for row in texts(made)] == [
        ["", "y", "=∑the chosen egef(x)", ""],
        ["K>1:", "ge", "=pesum of the K chosen p", "Mixtral"],
        ["", "bytes of all", "=4K(ep−1)ep×bytes of an element,", "both ways"],
    ]
    assert "<mfrac><mrow><msub><mi>p</mi><mi>e</mi></msub></mrow><mrow><mrow><mtext>sum" in made


def test_formulas_side_by_side_in_a_line_are_one_each_with_words_between_them():
    made = lines_as_mathml(
        ["    a = exp(s − m_new)     dq = dsᵀ k / √D      at the end  out = acc · v / l,  2 x y = c* FLOPs"]
    )
    named = ["a = exp(s − m_new)", "dq = dsᵀ k / √D", "out = acc · v / l,", "2 x y = c* FLOPs"]
    assert re.findall('aria-label="([^"]*)"', made) == named
    assert "<span>at the end</span>" in made and "<mtable>" not in made
    for inside in (
        "<mi>exp</mi>",
        "<msqrt><mi>D</mi></msqrt>",
        "<msup><mi>ds</mi><mi>T</mi></msup>",
        "<mi>acc</mi><mo>·</mo><mi>v</mi>",
        "<msup><mi>c</mi><mi>*</mi></msup>",
    ):
        assert inside in made


@pytest.mark.parametrize(
    "lines",
    [
        ["y = 2 x / m", "for x in y:"],
        ["y = x / m", "multiply tile 0 | write 0"],
        ["stage     2 layers of 3 · 24     9,216 elements / 4 ranks = 2,304"],
        ["lane of four      0     1", "has the weights   0 1   2 3"],
        ["query i sees key j  if  first <= j - i <= last"],
        ["x = f(y)"],
        ["return a / b"],
        ["a[0] = b / c"],
        ["p = q / r -> s"],
    ],
)
def test_pseudo_code_tables_and_drawings_stay_as_they_are(lines):
    assert not lines_as_mathml(lines)


@pytest.mark.parametrize(
    ("cell", "inside"),
    [
        ("2 · 7/8 T", "<mn>2</mn><mo>·</mo><mn>7</mn>"),
        ("4 Ψ/S · (R−1)/R", "</mfrac><mo>·</mo><mfrac>"),
        ("*r s*²", "<msup><mrow><mi>s</mi></mrow><mrow><mn>2</mn></mrow></msup>"),
        ("⌈log₂ P⌉α", "<mrow><mo>⌈</mo><mrow><msub><mi>log</mi><mn>2</mn></msub>"),
        ("2 N_kv D", "<msub><mi>N</mi><mi>kv</mi></msub>"),
        ("2 Q'", "<mi>Q′</mi>"),
    ],
)
def test_what_only_formulas_of_readmes_have_is_set(cell, inside):
    assert inside in cell_as_mathml(cell)


@pytest.mark.parametrize("readme", [path for path in READMES if ground_files(path)])
def test_every_core_file_has_a_part_of_its_readme_to_stand_beside(readme):
    text = (ROOT / readme).read_text()
    for file in ground_files(readme):
        part = ground_section(text, file.rpartition("/")[2])
        assert part.startswith("## "), file
        assert len(re.findall(r"(?m)^## ", re.sub(r"(?s)```.*?```", "", part))) == 1


def test_code_keeps_its_text_and_its_lines():
    text = 'def f(a: int) -> str:  # "no string"\n    """two\n    lines < 3"""\n\n    return \'#\' + f"{a}"\n'
    plain = [html.unescape(re.sub(r"<[^>]*>", "", line)) for line in coloured(text, "x.py")]
    assert "\n".join(plain) + "\n" == text
    made = coloured(text, "x.py")
    assert '<span class="nf">f</span>' in made[0]
    assert '<span class="c1"># &quot;no string&quot;</span>' in made[0]
    assert made[1].startswith('    <span class="s">') and made[2].startswith('<span class="s">')
    assert '<span class="k">__global__</span>' in coloured("__global__ void f() {} // x", "x.cu")[0]


@pytest.mark.parametrize("path", ["03_zero/zero.py", "09_kernels/matmul.cu", "Makefile"])
def test_every_line_of_a_file_has_its_number_and_no_line_is_empty_for_markdown(path):
    text = (ROOT / path).read_text()
    made = numbered(text, path)
    assert made.count('<span class="line" id="L') == len(text.rstrip("\n").split("\n"))
    assert "\n<span" not in made, "a line's end between two blocks is drawn as an empty line"
    assert "\n\n" not in made


@pytest.mark.parametrize("path", ["03_zero/zero.py", "09_kernels/matmul.cu"])
def test_the_lines_of_an_exercise_are_folded_under_their_title_and_no_others_are(path):
    text = (ROOT / path).read_text()
    made = re.findall(r'<details class="solution"><summary>(.*?)</summary>(.*?)</details>', numbered(text, path), re.S)
    begins = re.findall(r"--- (exercise [\d.]+): .* ---", text)
    titles = [f"the {inside.count('data-n')} lines of {begin}" for (_, inside), begin in zip(made, begins, strict=True)]
    assert [title for title, _ in made] == titles
    for (_, inside), body in zip(
        made, re.findall(r"--- exercise [^\n]* ---\n(.*?)\n *\S+ --- end", text, re.S), strict=True
    ):
        assert html.unescape(re.sub(r"<[^>]*>", "", inside)).rstrip("\n") == body.rstrip("\n")


def test_every_link_of_every_readme_leads_to_a_file_and_to_a_heading_or_a_line_of_it():
    wrong = []
    for readme in READMES:
        for url in links((ROOT / readme).read_text()):
            path, _, fragment = url.partition("#")
            if re.match(r"[a-z]+:", url):
                continue
            target = (ROOT / readme).parent / path if path else ROOT / readme
            if not target.exists():
                wrong.append(f"{readme}: {url}: there is no such file")
            elif fragment and target.suffix == ".md" and fragment not in anchors(target.read_text()):
                wrong.append(f"{readme}: {url}: there is no such heading")
            elif lines := re.fullmatch(r"L(\d+)(?:-L(\d+))?", fragment):
                last = len(target.read_text().splitlines())
                wrong += [f"{readme}: {url}: the file has {last} lines"] if int(lines[2] or lines[1]) > last else []
    assert not wrong


def test_a_link_from_a_name_to_a_line_leads_to_its_definition():
    named = re.compile(r"\[`([\w.]+)`\]\(([\w/.]+\.py)#L(\d+)\)")
    found = [(p, *link) for p in READMES for link in named.findall((ROOT / p).read_text())]
    assert found
    for readme, name, file, line in found:
        text = ((ROOT / readme).parent / file).read_text().splitlines()[int(line) - 1]
        own = name.rpartition(".")[2]
        assert re.match(rf"\s*(?:(?:def|class) {own}\b|{own}\b.*=)", text), f"{readme}: {name} is not in line {line}"


def test_every_picture_of_every_readme_has_an_alternative_text():
    pattern = r"!\[([^\]]*)\]\(([^)]+)\)"
    bare = [(p, url) for p in READMES for alt, url in re.findall(pattern, (ROOT / p).read_text()) if not alt.strip()]
    assert not bare


def test_a_link_to_a_file_that_is_not_there_stops_the_book(tmp_path):
    with pytest.raises(LookupError, match="there is no 03_zero/zorro.py"):
        Book(tmp_path).refer("index.md", "03_zero/zorro.py")
    book = Book(tmp_path)
    assert (
        book.refer("03_zero/index.md", "04_tensor_parallel/README.md", "traps")
        == "../04_tensor_parallel/index.md#traps"
    )
    assert book.wanted == ["04_tensor_parallel/README.md"]
