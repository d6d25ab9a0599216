"""The site: what the checker of links notices, and, where the generator is installed, the whole book in a browser."""

import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import build_book
import pytest
from check_site import faults, unreadable
from play_data import PLANS
from symbols import ROOT

GOOD = '<html><body><h1 id="a">A</h1><a href="b/c.html#x">b</a> <a href="#a">a</a> <a href="https://x.org">x</a>{}</body></html>'


def site(folder, more=""):
    (folder / "b").mkdir()
    (folder / "index.html").write_text(GOOD.format(more))
    (folder / "b" / "c.html").write_text('<p id="x"><a href="../index.html">up</a></p>')
    return folder


def test_a_site_whose_links_all_lead_somewhere_has_no_faults(tmp_path):
    assert faults(site(tmp_path)) == []
    assert faults(tmp_path / "b" / "none") != []


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ('<a href="d.html">d</a>', "d.html leads nowhere"),
        ('<a href="b/c.html#y">c</a>', "no #y there"),
        ('<a href="#y">y</a>', "no #y there"),
        ('<a href="/b/c.html">c</a>', "works on one server only"),
        ('<script src="https://x.org/a.js"></script>', "fetches https://x.org/a.js"),
        ('<link rel="stylesheet" href="//x.org/a.css">', "fetches //x.org/a.css"),
        ('<img src="b/c.html" alt="">', "has no alternative text"),
        ('<img src="b/d.svg" alt="d">', "b/d.svg is not there"),
        ('<p id="a">again</p>', "two things are called #a"),
    ],
)
def test_what_is_broken_or_fetched_is_named(more, fault, tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "site")
    site(tmp_path / "site", more)
    [line] = faults(tmp_path / "link")
    assert line.startswith("index.html: ") and line.endswith(fault), line


def test_a_style_that_fetches_a_font_is_named(tmp_path):
    (site(tmp_path) / "a.css").write_text("@font-face { src: url(https://x.org/f.woff2) }")
    assert faults(tmp_path) == ["a.css: fetches from outside"]


DRAWN = (
    '<svg xmlns:xlink="l"><style>@media (prefers-color-scheme: dark) {{ [fill="#444444"] {{ fill: #c8c8c8 }} }}</style>'
    '<defs><path id="p" d="M0 0L90 0L90 20L0 20z"/></defs><text x="5" y="15" {}>{}</text></svg>'
)


@pytest.mark.parametrize(
    ("below", "look", "pages"),
    [
        ("", 'fill="#444444"', ""),
        ("", 'fill="#808080"', "light"),
        ("", 'style="font-size: 9px; fill: #444"', "dark"),
        ('<rect width="90" height="20" fill="#e69f00"/>', "", ""),
        ('<rect width="90" height="20" fill="#e69f00"/>', 'fill="#444444"', "light dark"),
        ('<use xlink:href="#p" style="fill: #0072b2; opacity: 0.3"/>', "", "dark"),
        ('<rect width="90" height="20" fill="none"/>', "", "dark"),
        ('<circle cx="20" cy="12" r="20" fill="white"/>', 'transform="translate(5 0)"', ""),
        ('<rect x="2" width="6" height="20" fill="#000"/>', 'transform="rotate(90 5 15)" fill="white"', "light"),
    ],
)
def test_words_of_a_figure_without_contrast_are_named(below, look, pages):
    found = unreadable(DRAWN.replace("<text", f"{below}<text").format(look, "abcd"))
    assert " ".join(line.split()[3] for line in found) == pages, found


def test_words_of_every_figure_can_be_read_on_a_light_page_and_on_a_dark_one():
    figures = list(ROOT.glob("*/figures/*.svg"))
    wrong = [f"{file.relative_to(ROOT)}: {line}" for file in figures for line in unreadable(file.read_text())]
    assert len(figures) > 50 and not wrong, "\n".join(wrong)


def test_the_one_script_that_the_generator_would_fetch_is_ours(tmp_path):
    site(tmp_path)
    (tmp_path / "b" / "c.html").write_text(f'<script src="{build_book.FETCHED}"></script>')
    build_book.stay_at_home(tmp_path)
    assert (tmp_path / "b" / "c.html").read_text() == '<script src="../assets/worker_for_files.js"></script>'


@pytest.mark.prove
@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium here")
@pytest.mark.parametrize("missing", ["a/book/none.html", "a/book/book/03_zero/none.html"])
def test_the_page_for_wrong_addresses_finds_the_book_in_any_folder_of_a_server(missing, tmp_path):
    class Server(SimpleHTTPRequestHandler):
        def send_error(self, code, *_):
            self.error_message_format = (tmp_path / "a" / "book" / "404.html").read_text().replace("%", "%%")
            super().send_error(code)

    (tmp_path / "a" / "book" / "assets").mkdir(parents=True)
    build_book.stay_at_home(site(tmp_path / "a" / "book"))
    (tmp_path / "a" / "book" / "assets" / "book.css").touch()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = shown(f"http://127.0.0.1:{server.server_port}/{missing}")
        server.shutdown()
    assert re.search('id="book" href="([^"]*)"', page)[1] == "/a/book/index.html"


def test_a_page_has_a_title_and_a_description_of_its_own():
    text = (
        "# Chapter 3: `zero` {#zero}\n\n![a](b)\n\n```sh\nmake a\n```\n\nShards *all*, see [x](y). Then more.\n\nNo.\n"
    )
    made = build_book.titled(text)
    assert made == f'---\ntitle: "Chapter 3: zero"\ndescription: "Shards all, see x. Then more."\n---\n{text}'
    hidden = build_book.titled(f"---\nhide:\n  - toc\n---\n{text}")
    assert hidden.startswith('---\nhide:\n  - toc\ntitle: "Chapter 3: zero"\n') and hidden.endswith(f"---\n{text}")
    assert 'description: "A' in build_book.titled("# A\n\n| b |\n| --- |\n"), "without a paragraph it is the heading"
    long = build_book.titled(f"# A\n\nFirst. {'word ' * 40}end.\n")
    assert 'description: "First."\n' in long


@pytest.mark.prove
@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium here")
def test_the_cheat_sheet_prints_on_one_page(tmp_path):
    page = build_book.SITE / "one_page.html"
    if not page.exists():
        pytest.skip(reason="the book is not built; `make book` builds it (it needs zensical)")
    options = ["--headless", "--no-sandbox", "--no-pdf-header-footer", f"--print-to-pdf={tmp_path / 'a.pdf'}"]
    subprocess.run(["chromium", *options, f"file://{page}"], check=True, capture_output=True, timeout=60)
    assert len(re.findall(rb"/Type\s*/Page\b", (tmp_path / "a.pdf").read_bytes())) == 1


def test_cells_with_many_words_and_code_with_few_letters_are_called_so(tmp_path):
    many = "<em>word</em> " * 20
    page = f'<td>1</td><td style="text-align: right;">{many}</td><code>--zero 3</code><code>{"x" * 25}</code>'
    page += "<pre><code>a</code></pre><pre><span></span><code>a</code></pre>"
    page += "<code>python x.py --zero-offload --zero 2 --tp 2</code>"
    rows = f"<tr><td>1</td><td>2</td><td>{many}</td></tr>"
    page += f"<table><tr><th>a</th><th>b <i>c</i></th><th></th></tr>{rows}</table><code>{'x_' * 13}</code>"
    (tmp_path / "a.html").write_text(page)
    build_book.stay_at_home(tmp_path)
    made = page.replace("<td style", '<td class="long" style').replace("<code>--", '<code class="short">--')
    for option in ("--zero-offload", "--zero 2", "--tp 2"):
        made = made.replace(option, f'<span class="short">{option}</span>')
    cells = f'<td data-head="a">1</td><td data-head="b c">2</td><td data-head="" class="long">{many}</td>'
    made = made.replace("<table>", '<table data-words="1">').replace(rows, f"<tr>{cells}</tr>")
    assert (tmp_path / "a.html").read_text() == made.replace("x_", "x_<wbr>")


def shown(address: str, wait: int = 4000) -> str:
    """The page as a browser has it after its scripts; whatever is not on this machine cannot be reached."""
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--proxy-server=127.0.0.1:9"]
    command += [f"--virtual-time-budget={wait}", "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.prove
@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium here")
def test_the_whole_book_is_built_and_its_pages_draw_in_a_browser_without_a_network():
    if not find_spec("zensical"):
        pytest.skip(reason="zensical is not installed; `make book` installs it")
    done = subprocess.run([sys.executable, str(ROOT / "book" / "build_book.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for name, words in {
        "schedules": "idle time / compute time 37.5 %",
        "memory": "GB at the peak",
        "ring": "Round 0",
        "experts": "Step 1",
    }.items():
        page = shown(f"file://{build_book.SITE}/{name}.html")
        assert "<svg viewBox" in page, name
        assert words in page, name
    assert f'src="assets/{next(iter(PLANS))}.html"' in shown(f"file://{build_book.SITE}/planner.html")
    told = {"plan_8b_on_8": "there is no pipeline", "plan_70b_on_64": "1F1B, a row for each rank"}
    for name in PLANS:  # the planner's own pages, which that one holds
        page = shown(f"file://{build_book.SITE}/assets/{name}.html").partition("<script>")[0]
        assert "GB on each of" in page and told[name] in page, name


# Every word that can be seen, over the grounds below it, in both palettes: which have less contrast than 4.5?
READ = """<style>* { transition: none !important }</style><script>
const pen = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d"), dim = new Set();
const rgba = colour => {
  pen.clearRect(0, 0, 1, 1);
  pen.fillStyle = colour;
  pen.fillRect(0, 0, 1, 1);
  return [...pen.getImageData(0, 0, 1, 1).data].map(x => x / 255);
};
const over = (top, ground) => ground.map((x, i) => top[i] * top[3] + x * (1 - top[3]));
const light = colour => 0.05 + [0.2126, 0.7152, 0.0722].reduce((sum, part, i) =>
  sum + part * (colour[i] <= 0.04045 ? colour[i] / 12.92 : ((colour[i] + 0.055) / 1.055) ** 2.4), 0);
function read(palette) {
  document.body.dataset.mdColorScheme = palette;
  const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (words.nextNode()) {
    const parent = words.currentNode.parentElement, box = [];
    if (!words.currentNode.data.trim() || parent.closest("script, style, svg") || !parent.checkVisibility()) continue;
    for (let around = parent; around; around = around.parentElement) box.unshift(getComputedStyle(around));
    const ground = box.reduce((below, style) => over(rgba(style.backgroundColor), below), [1, 1, 1]);
    const ink = rgba(getComputedStyle(parent).color);
    ink[3] *= box.reduce((product, style) => product * style.opacity, 1);
    const one = light(ground), other = light(over(ink, ground)), contrast = Math.max(one, other) / Math.min(one, other);
    if (ink[3] && !(contrast >= 4.5)) dim.add(`${palette} ${words.currentNode.data.trim()} ${contrast.toFixed(2)}`);
  }
}
setTimeout(() => { read("default"); read("slate"); document.body.append(`DIM ${[...dim].join("; ")}.`); }, 1500);
</script></body>"""


# The page's own search, asked as its input field would ask it. The answer comes through our stand-in for a Worker.
ASK = """<script>
const Ours = window.Worker, said = [];
window.Worker = class extends Ours {
  constructor(address) {
    super(address);
    window.asked = this;
    this.addEventListener("message", e => said.push(e.data));
  }
};
const open = new KeyboardEvent("keydown", { key: "k", code: "KeyK", ctrlKey: true, bubbles: true });
const all = {
  input: { type: "operator", data: { operator: "and", operands: [] } },
  aggregation: { input: [{ type: "term", data: { field: "tags" } }] },
};
const counts = () => said.filter(m => m.type === 3).map(m => m.data.items.length);
setTimeout(() => document.dispatchEvent(open), 1500);
setTimeout(() => asked.postMessage({ type: 2, data: { input: "zigzag", filter: all } }), 5000);
setTimeout(() => document.body.append(`FOUND ${counts()}.`), 9000);
</script></body>"""


@pytest.mark.prove
@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium here")
@pytest.mark.parametrize("name", ["03_zero/zero.py.html", "schedules.html", "cheat_sheet.html"])
def test_words_of_a_page_can_be_read_in_both_palettes(name):
    page = build_book.SITE / name
    if not page.exists():
        pytest.skip(reason="the book is not built; `make book` builds it (it needs zensical)")
    reading = page.with_name("reading.html")
    reading.write_text(page.read_text().replace("</body>", READ))
    try:
        [dim] = re.findall("DIM ([^<]*)[.]", shown(f"file://{reading}"))[-1:]
        assert dim == ""
    finally:
        reading.unlink()


@pytest.mark.prove
@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium here")
def test_search_answers_on_a_page_that_was_opened_as_a_file():
    index = build_book.SITE / "index.html"
    if not index.exists():
        pytest.skip(reason="the book is not built; `make book` builds it (it needs zensical)")
    asking = index.with_name("asking.html")
    asking.write_text(index.read_text().replace("</body>", ASK))
    try:
        found = re.search(r"FOUND ([\d,]+)\.", shown(f"file://{asking}", wait=12000))
    finally:
        asking.unlink()
    assert found and int(found[1].split(",")[-1]) > 0, found
