"""Checks the built site: links lead somewhere, and nothing is loaded from elsewhere."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src"}


class Page(HTMLParser):
    """The anchors of a page, its links, and the addresses that it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value for key, value in attrs if value}
        self.anchors |= {found[key] for key in ("id", "name") if key in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in LOADED and LOADED[tag] in found and found.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(found[LOADED[tag]])


def faults(site: Path) -> list[str]:
    """One line for each link that leads nowhere and each file that is loaded from another host."""
    pages = {path.resolve(): Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        found += [f"{name}: loads {address}" for address in page.loaded if urlsplit(address).netloc]
        for link in sorted({*page.links, *page.loaded}):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or (name.name == "404.html"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                found.append(f"{name}: {link} does not exist")
            elif target in pages and _missing(unquote(parts.fragment), pages[target]):
                found.append(f"{name}: {link} has no such anchor")
    return found


def _missing(anchor: str, page: Page) -> bool:
    """Anchors that start with `__` belong to the theme's scripts."""
    return bool(anchor) and not anchor.startswith("__") and anchor not in page.anchors
