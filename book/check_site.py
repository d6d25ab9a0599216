"""Every link and anchor of a built site leads somewhere inside it, and nothing in it is fetched from outside.

    python book/check_site.py FOLDER

It reads HTML as a browser would that has no network and was given a folder: links must be relative (so the site works
from file:// and below a sub-path), their files and anchors must exist, pictures must have an alternative text, and no
picture, script, style or font may come from another machine. A link that a reader has to click may lead outside.
The words of a figure stand out from what is drawn below them, on a light page and on a dark one.
"""

import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

FETCHED = dict.fromkeys(("script", "img", "iframe", "source", "video", "audio"), "src") | {"object": "data"}
OUTSIDE = re.compile(r"^(https?:)?//")
IN_STYLE = re.compile(r"@import\s+[\"']?(https?:)?//|url\(\s*[\"']?(https?:)?//")


class Page(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.faults: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, given: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in given}
        if "id" in attributes:
            if attributes["id"] in self.ids:
                self.faults.append(f"two things are called #{attributes['id']}")
            self.ids.add(attributes["id"])
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        if tag in FETCHED and attributes.get(FETCHED[tag]):
            self.fetched.append(attributes[FETCHED[tag]])
        if tag == "link" and attributes.get("rel", "") not in ("canonical", "next", "prev", "alternate"):
            self.fetched.append(attributes.get("href", ""))
        if tag == "img" and not attributes.get("alt", "").strip():
            self.faults.append(f"the picture {attributes.get('src')} has no alternative text")


def faults(site: Path) -> list[str]:
    """One line for each thing that is wrong."""
    site = site.resolve()  # as the targets of links are
    pages = {file: Page(file.read_text()) for file in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site} has no page"]
    for file, page in pages.items():
        where = file.relative_to(site)
        found += [f"{where}: {fault}" for fault in page.faults]
        for address in page.fetched:
            if OUTSIDE.match(address):
                found.append(f"{where}: fetches {address}")
            elif not address.startswith("data:") and not target_of(file, address, site)[0].exists():
                found.append(f"{where}: {address} is not there")
        if file.name == "404.html":
            continue  # a server's own page: its links begin at the root
        for address in page.links:
            if re.match(r"(https?|mailto):", address):
                continue
            if address.startswith("/") or re.match(r"[a-z]+:", address):
                found.append(f"{where}: {address} works on one server only")
                continue
            target, fragment = target_of(file, address, site)
            if not target.is_file():
                found.append(f"{where}: {address} leads nowhere")
            elif fragment and target in pages and fragment not in pages[target].ids:
                found.append(f"{where}: {address}: no #{fragment} there")
    for file in sorted(site.rglob("*.css")):
        if IN_STYLE.search(file.read_text()):
            found.append(f"{file.relative_to(site)}: fetches from outside")
    return found


def target_of(file: Path, address: str, site: Path) -> tuple[Path, str]:
    parts = urlsplit(address)
    if not parts.path:
        return file, unquote(parts.fragment)
    target = (
        site / parts.path.lstrip("/") if parts.path.startswith("/") else file.parent / unquote(parts.path)
    ).resolve()
    return (target / "index.html" if target.is_dir() else target), unquote(parts.fragment)


PAPER = {"light": "#ffffff", "dark": "#0d1117"}
CONTRAST = 4.5  # WCAG 2, AA: of the lighter to the darker, each with 0.05 for the light of the room
LOOKS = ("fill", "opacity", "fill-opacity", "font-size", "text-anchor")
MOVES = re.compile(r"(\w+)\(([^)]*)\)")
Point = tuple[float, float]


def rgb(colour: str) -> list[float]:
    digits = {"black": "000000", "white": "ffffff"}.get(colour, colour.lstrip("#"))
    digits = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
    return [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]


def contrast(one: list[float], other: list[float]) -> float:
    def light(colour: list[float]) -> float:
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in colour]
        return 0.05 + 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    return max(light(one), light(other)) / min(light(one), light(other))


def inside(point: Point, corners: list[Point]) -> bool:
    (x, y), crossed = point, False
    for (a, b), (c, d) in zip(corners, [*corners[1:], corners[0]], strict=True):
        if (b > y) != (d > y) and x < a + (y - b) * (c - a) / (d - b):
            crossed = not crossed
    return crossed


def words_and_shapes(svg: str) -> tuple[list[tuple], list[tuple]]:
    """(shapes below it, middle of the line, look, text) of each word, and (box, corners, look) of each shape, in the
    order of drawing. Transformations other than those of words are not followed."""
    words, shapes, defined = [], [], {}

    def walk(element: ElementTree.Element, look: dict[str, str], defines: bool) -> None:
        tag, given = element.tag.rpartition("}")[2], element.attrib
        if tag in ("style", "metadata", "marker"):
            return
        style = dict(re.findall(r"([\w-]+):\s*([^;]+)", given.get("style", "")))
        look = look | {name: value for name, value in {**given, **style}.items() if name in LOOKS}
        x, y = (float(given.get(name, 0)) for name in "xy")
        corners: list[Point] = []
        if tag in ("rect", "circle"):
            x, y = x + float(given.get("cx", 0)), y + float(given.get("cy", 0))
            r = float(given.get("r", 0))
            wide, high = (float(given.get(name, r)) for name in ("width", "height"))
            corners = [(x - r, y - r), (x + wide, y - r), (x + wide, y + high), (x - r, y + high)]
        elif tag == "path":
            numbers = [float(number) for number in re.findall(r"-?\d+\.?\d*", given.get("d", ""))]
            corners = list(zip(numbers[::2], numbers[1::2], strict=False))
        elif tag == "use":
            name = next(value for key, value in given.items() if key.endswith("href"))
            corners = [(a + x, b + y) for a, b in defined.get(name[1:], [])]
        if defines and "id" in given:
            defined[given["id"]] = corners
        elif corners and look.get("fill", "black") != "none":
            across, down = zip(*corners, strict=True)
            shapes.append(((min(across), max(across), min(down), max(down)), corners, look))
        text = "".join(element.itertext()).strip()
        if tag == "text" and text:
            size = float(re.match(r"[\d.]+", look.get("font-size", "10"))[0])
            half = 0.275 * size * len(text)
            along = {"middle": 0.0, "end": -half}.get(look.get("text-anchor", ""), half)
            moves = {
                name: [float(n) for n in re.findall(r"-?[\d.]+", numbers)]
                for name, numbers in MOVES.findall(given.get("transform", ""))
            }
            angle = math.radians(moves.get("rotate", [0.0])[0])
            x, y = (old + new for old, new in zip((x, y), moves.get("translate", (0.0, 0.0)), strict=True))
            x += along * math.cos(angle) + 0.35 * size * math.sin(angle)
            y += along * math.sin(angle) - 0.35 * size * math.cos(angle)
            words.append((len(shapes), (x, y), look, text))
        for child in element:
            walk(child, look, defines or tag in ("defs", "clipPath"))

    walk(ElementTree.fromstring(svg), {}, False)
    return words, shapes


def unreadable(svg: str) -> list[str]:
    """One line for each word of a figure without enough contrast."""
    words, shapes = words_and_shapes(svg)
    in_the_dark = dict(re.findall(r"\[[^\]]*fill[^\]]*(#\w{6})\"\] \{ fill: (#\w{6})", svg))
    found = []
    for drawn, where, look, text in words:
        x, y = where
        near = [
            shape for shape in shapes[:drawn] if shape[0][0] <= x <= shape[0][1] and shape[0][2] <= y <= shape[0][3]
        ]
        below = [layer for _, corners, layer in near if inside(where, corners)]
        for page, paper in PAPER.items():
            ground = rgb(paper)
            for layer in (*below, look):
                fill = layer.get("fill", "black")
                colour = rgb(in_the_dark.get(fill, fill) if page == "dark" else fill)
                part, ink = float(layer.get("opacity", 1)) * float(layer.get("fill-opacity", 1)), ground
                ground = [part * new + (1 - part) * old for new, old in zip(colour, ground, strict=True)]
            if not contrast(ground, ink) >= CONTRAST:
                found.append(f"{text!r} on a {page} page: contrast {contrast(ground, ink):.2f}")
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("check_site.py: which folder? For example: python book/check_site.py book/site")
    wrong = faults(Path(sys.argv[1]))
    print("\n".join(wrong) or "every link leads somewhere, and nothing is fetched from outside")
    sys.exit(bool(wrong))
