"""Hold every link within the built docs site: its file and its heading must be there.

Links to other sites are not followed, so that the check needs no network.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_NAMES_OF_LINKS = {"a": "href", "link": "href", "img": "src", "script": "src"}


class _Page(HTMLParser):
    """The links of a page, and the places in it that a link can lead to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.places |= {value for name in ("id", "name") if (value := values.get(name))}
        if (link := values.get(_NAMES_OF_LINKS.get(tag, ""))) is not None:
            self.links.append(link)


def broken(site: Path) -> Iterator[str]:
    """Yield a line for each link of a page that leads nowhere in the site."""
    pages = {path.resolve(): _Page(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                yield f"{path.relative_to(site.resolve())}: {link}: there is no such file"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].places:
                yield f"{path.relative_to(site.resolve())}: {link}: there is no such heading"


if __name__ == "__main__":
    found = list(broken(Path(sys.argv[1])))
    print("\n".join(found), file=sys.stderr)
    sys.exit(bool(found))
