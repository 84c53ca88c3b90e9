"""Check the links of a built site offline: every local address leads to a file, and to an element with its anchor.

Run as `python docs/check_links.py FOLDER`. It prints each broken link and exits with 1 if there is one.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The addresses that a page refers to, and the anchors that it has."""

    def __init__(self, text: str):
        super().__init__()
        self.addresses: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        self.addresses |= {values[name] for name in ("href", "src") if values.get(name)}


def broken_links(folder: Path) -> list[str]:
    pages = {file.resolve(): Page(file.read_text(encoding="utf-8")) for file in folder.rglob("*.html")}
    broken = []
    for file, page in pages.items():
        for address in sorted(page.addresses):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            anchor = unquote(parts.fragment)
            if not target.exists() or (anchor and target in pages and anchor not in pages[target].anchors):
                broken.append(f"{file.relative_to(folder.resolve())}: {address}")
    return broken


if __name__ == "__main__":
    broken = broken_links(Path(sys.argv[1]))
    print(*broken, sep="\n")
    sys.exit(1 if broken else 0)
