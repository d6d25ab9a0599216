"""Every link and anchor of a built site leads somewhere inside it, and nothing in it is fetched from outside.

    python book/check_site.py FOLDER

It reads HTML as a browser would that has no network and was given a folder: links must be relative (so the site works
from file:// and below a sub-path), their files and anchors must exist, pictures must have an alternative text, and no
picture, script, style or font may come from another machine. A link that a reader has to click may lead outside.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "object": "data",
}
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


if __name__ == "__main__":
    wrong = faults(Path(sys.argv[1]).resolve())
    print("\n".join(wrong) or "every link leads somewhere, and nothing is fetched from outside")
    sys.exit(bool(wrong))
